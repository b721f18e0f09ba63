package process

import (
	"os/user"
	"strconv"
)

// UserName names a Unix user as the audit log does: unix:NAME, or unix:uid-N for one without a name.
func UserName(uid uint32) string {
	n := strconv.FormatUint(uint64(uid), 10)
	if u, err := user.LookupId(n); err == nil {
		return "unix:" + u.Username
	}
	return "unix:uid-" + n
}
