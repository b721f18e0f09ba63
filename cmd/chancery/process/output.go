package process

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"unicode"

	"github.com/chancery-project/chancery/ca/durable"
)

// CheckFormat checks the value of --output.
func CheckFormat(got string, known ...string) error {
	if slices.Contains(known, got) {
		return nil
	}
	return fmt.Errorf("--output %q is not known; use %s", got, strings.Join(known, ", "))
}

// WriteJSON prints a value as indented JSON.
func WriteJSON(out io.Writer, v any) error {
	enc := json.NewEncoder(out)
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}

// Printable replaces what could steer a terminal in text that others wrote, such as the names in a certificate.
func Printable(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return '\uFFFD'
	}, s)
}

// WriteAddrFile writes where a process listens; see ReplaceFile. An empty path writes nothing.
func WriteAddrFile(path, content string) error {
	if path == "" {
		return nil
	}
	if err := ReplaceFile(path, []byte(content), 0o644); err != nil {
		return fmt.Errorf("addrFile: %w", err)
	}
	return nil
}

// ReplaceFile writes a file of the given mode, whatever the umask, complete or not at all.
func ReplaceFile(path string, data []byte, mode os.FileMode) error {
	if err := durable.Replace(path, data, mode); err != nil {
		return fmt.Errorf("writing %s: %w", path, err)
	}
	return nil
}
