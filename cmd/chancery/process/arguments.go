package process

import (
	"encoding/hex"
	"fmt"
	"strings"
	"time"
)

// CleanSerial accepts a serial as tools print it: hex, maybe in upper case, with colons, or with a zero in front.
func CleanSerial(s string) (string, error) {
	clean := strings.ToLower(strings.ReplaceAll(s, ":", ""))
	if len(clean)%2 == 1 {
		clean = "0" + clean
	}
	b, err := hex.DecodeString(clean)
	for len(b) > 1 && b[0] == 0 {
		b = b[1:]
	}
	if err != nil || len(b) == 0 || len(b) > 20 {
		return "", fmt.Errorf("%q is no serial; it should be hex, of up to 20 bytes", s)
	}
	return hex.EncodeToString(b), nil
}

// TimeOrAgo reads a flag that holds a time, or how long ago it was.
func TimeOrAgo(flag, s string, now time.Time) (time.Time, error) {
	if ago, err := time.ParseDuration(s); err == nil && ago >= 0 {
		return now.Add(-ago), nil
	}
	t, err := time.Parse(time.RFC3339, s)
	if err != nil {
		return t, fmt.Errorf("%s %q should be a time like 2026-11-30T08:00:00Z or a duration like 2h", flag, s)
	}
	return t, nil
}
