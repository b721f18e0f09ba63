package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/chancery-project/chancery/ca/checkup"
)

// room is what a file system has left.
type room struct {
	free, total       uint64 // bytes, as others than root have them
	freeNodes, inodes uint64
}

// checkDisks looks at the room where a server writes, once for each file system.
func (e *exam) checkDisks(context.Context) {
	c := e.settings.Config
	seen := map[uint64]bool{}
	for _, p := range []struct{ what, path string }{
		{"audit log", c.AuditLog}, {"issuance log", c.IssuanceLog}, {"state", c.State.SQLite}, {"folder of the server", c.State.Dir}, {"key folder", c.Keys.Dir},
	} {
		if p.path == "" {
			continue
		}
		path, err := existing(p.path)
		var st unix.Stat_t
		var fs unix.Statfs_t
		if err == nil {
			err = errors.Join(unix.Stat(path, &st), unix.Statfs(path, &fs))
		}
		if err != nil {
			e.unchecked("disk of "+p.path, err)
			continue
		}
		if seen[st.Dev] {
			continue
		}
		seen[st.Dev] = true
		block := uint64(fs.Bsize)
		e.findings = append(e.findings, judgeRoom("disk of "+p.what+" "+p.path,
			room{free: fs.Bavail * block, total: fs.Blocks * block, freeNodes: fs.Ffree, inodes: fs.Files})...)
	}
}

// The least room: so much, or so large a part of the disk if that is less.
const (
	lowBytes, lowPart       = 1 << 30, 10
	scarceBytes, scarcePart = 100 << 20, 50
)

func judgeRoom(subject string, r room) []checkup.Finding {
	says := fmt.Sprintf("has %d MiB left of %d MiB", r.free>>20, r.total>>20)
	severity := checkup.OK
	switch {
	case r.free < min(scarceBytes, r.total/scarcePart):
		severity = checkup.Critical
	case r.free < min(lowBytes, r.total/lowPart):
		severity = checkup.Warning
	}
	if r.inodes > 0 && severity == checkup.OK { // some file systems do not count them
		says = fmt.Sprintf("has %d inodes left of %d", r.freeNodes, r.inodes)
		switch {
		case r.freeNodes < r.inodes/100:
			severity = checkup.Critical
		case r.freeNodes < r.inodes/20:
			severity = checkup.Warning
		}
	}
	if severity == checkup.OK {
		return nil
	}
	return []checkup.Finding{checkup.Found("disk.low", severity, subject, "%s", says)}
}

// existing returns the path, or the nearest folder above it that exists.
func existing(path string) (string, error) {
	for {
		_, err := os.Stat(path)
		if !errors.Is(err, fs.ErrNotExist) {
			return path, err
		}
		up := filepath.Dir(path)
		if up == path {
			return "", err
		}
		path = up
	}
}

// isVolatile reports whether a file lies, or would lie, in memory.
func isVolatile(path string) (bool, error) {
	path, err := existing(path)
	if err != nil {
		return false, err
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(path, &fs); err != nil {
		return false, err
	}
	return fs.Type == unix.TMPFS_MAGIC || fs.Type == unix.RAMFS_MAGIC, nil
}
