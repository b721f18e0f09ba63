package doctor

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/chancery-project/chancery/ca/checkup"
	"github.com/chancery-project/chancery/ca/issuelog"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/keys/pkcs11"
	"github.com/chancery-project/chancery/trust"
)

// file is a file or folder of a server, and what its mode may be at most.
type file struct {
	what, path string
	most       os.FileMode
	secret     bool // others who read it have a part of the CA
	needed     bool // a server does not start without it
	own        bool // it should belong to the server's user
}

// serverFiles are those that a config names. docs/security.md says what who can read or write each could do.
func (e *exam) serverFiles() []file {
	c := e.settings.Config
	all := []file{
		{what: "config", path: e.config, most: 0o644, needed: true},
		{what: "mark of the state", path: e.settings.Place().Mark(), most: 0o600, own: true},
		{what: "sealing key", path: c.State.SealingKey, most: 0o600, secret: true, own: true},
		{what: "audit log", path: c.AuditLog, most: 0o640, own: true}, // a log shipper may read it, by its group
		{what: "roots", path: e.settings.RootsFile(), most: 0o644},
		{what: "admin socket", path: e.settings.AdminSocket(), most: 0o600},
	}
	if c.State.SQLite != "" {
		for _, end := range []string{"", "-wal", "-shm", ".lock"} {
			all = append(all, file{what: "state", path: c.State.SQLite + end, most: 0o600, own: true})
		}
	}
	if p := c.State.Postgres; p != nil && p.PasswordFile != "" {
		all = append(all, file{what: "password of the state", path: p.PasswordFile, most: 0o600, secret: true, needed: true, own: true})
	}
	if k := c.State.Kubernetes; k != nil && k.Kubeconfig != "" {
		all = append(all, file{what: "kubeconfig of the state", path: k.Kubeconfig, most: 0o640, needed: true})
	}
	if dir := c.IssuanceLog; dir != "" {
		all = append(all,
			file{what: "issuance log", path: dir, most: 0o750, own: true},
			file{what: "key of the issuance log", path: filepath.Join(dir, "log.key"), most: 0o600, secret: true, own: true},
			file{what: "issuance log", path: filepath.Join(dir, issuelog.CheckpointFile), most: 0o640, own: true},
			file{what: "issuance log", path: filepath.Join(dir, issuelog.JournalFiles[0]), most: 0o640, own: true},
			file{what: "issuance log", path: filepath.Join(dir, issuelog.JournalFiles[1]), most: 0o640, own: true})
	}
	if c.Keys.Dir != "" {
		all = append(all, file{what: "key folder", path: c.Keys.Dir, most: 0o700, own: true},
			file{what: "passphrase", path: c.Keys.PassphraseFile, most: 0o600, secret: true, needed: true, own: true})
	}
	for what, path := range c.Parent.Secrets() {
		all = append(all, file{what: what, path: path, most: 0o600, secret: true, own: true})
	}
	if uri, err := pkcs11.ParseURI(c.Keys.PKCS11); err == nil { // else there is none: the config was checked
		module, pin := uri.Files()
		all = append(all, file{what: "PKCS#11 library", path: module, most: 0o755, needed: true},
			file{what: "PIN", path: pin, most: 0o600, secret: true, needed: true, own: true})
	}
	if c.Issuer != nil { // the server takes what a mounted Secret looks like by default, which others can read
		key := filepath.Join(c.Issuer.CACerts, "ca-key.pem")
		if c.Issuer.TLS != "" {
			key = filepath.Join(c.Issuer.TLS, "tls.key")
		}
		all = append(all, file{what: "issuer's key", path: key, most: 0o640, needed: true})
	}
	for _, k := range c.Clusters {
		if k.JWKSFile != "" {
			all = append(all, file{what: "keys of cluster " + k.Name, path: k.JWKSFile, most: 0o644, needed: true})
		}
		if k.Kubeconfig != "" {
			all = append(all, file{what: "kubeconfig of cluster " + k.Name, path: k.Kubeconfig, most: 0o640, needed: true})
		}
	}
	return all
}

// checkFiles looks at modes, owners and rights.
func (e *exam) checkFiles(context.Context) {
	c := e.settings.Config
	user := int64(-1)
	if info, err := os.Stat(e.ownFile()); err == nil {
		user = int64(ownerOf(info))
	}
	for _, f := range e.serverFiles() {
		e.checkFile(f, user)
	}
	folders := map[string]bool{}
	once := func(dir string, user int64) {
		if !folders[dir] {
			folders[dir] = true
			e.checkFolder(dir, user)
		}
	}
	if c.State.SQLite != "" {
		once(filepath.Dir(c.State.SQLite), user)
	}
	once(c.State.Dir, user)
	once(filepath.Dir(c.State.SealingKey), user)
	once(filepath.Dir(e.config), -1) // often an admin's, as are issuer files
	if c.Issuer != nil {
		once(c.Issuer.CACerts+c.Issuer.TLS, -1) // one of which is set
	}
}

// checkFile looks at one; user is who should own it, below 0 if that is not known.
func (e *exam) checkFile(f file, user int64) {
	subject := f.what + " " + f.path
	info, err := os.Stat(f.path)
	if errors.Is(err, fs.ErrNotExist) {
		if f.needed {
			e.found("file.unreadable", checkup.Critical, subject, "does not exist")
		}
		return
	} else if err != nil {
		e.unchecked(subject, err)
		return
	}
	if mode := info.Mode().Perm(); mode&0o077 != 0 && f.secret && keys.Private(info) {
		f.own = false // root's, and lent to a group of ours, as Kubernetes mounts Secrets
	} else {
		e.findings = append(e.findings, judgeMode(f, mode)...)
	}
	if f.needed {
		if err := unix.Faccessat(unix.AT_FDCWD, f.path, unix.R_OK, unix.AT_EACCESS); err != nil && e.isStranger() {
			e.unchecked(subject, err)
		} else if err != nil {
			e.found("file.unreadable", checkup.Critical, subject, "cannot be read by %s: %v", owner(uint32(os.Geteuid())), err)
		}
	}
	if uid := ownerOf(info); f.own && user > 0 && int64(uid) != user { // root may open whatever it likes
		e.found("file.owner", checkup.Warning, subject, "belongs to %s, and the state to %s", owner(uid), owner(uint32(user)))
	}
}

// ownFile is a file that the server's user made: the state, or, where that is no file, the audit log.
func (e *exam) ownFile() string {
	if e.settings.State.SQLite != "" {
		return e.settings.State.SQLite
	}
	return e.settings.AuditLog
}

// isStranger reports whether this user is neither root nor the one that the server seems to run as, so that what it may not
// do says nothing of the server.
func (e *exam) isStranger() bool {
	if e.settings == nil { // an agent's
		return false
	}
	info, err := os.Stat(e.ownFile())
	return os.Geteuid() != 0 && (err != nil || ownerOf(info) != uint32(os.Geteuid()))
}

// judgeMode holds a mode to what it may be at most.
func judgeMode(f file, mode os.FileMode) (all []checkup.Finding) {
	subject, too := f.what+" "+f.path, mode&^f.most
	if too&0o044 != 0 {
		severity := checkup.Warning
		if f.secret {
			severity = checkup.Critical
		}
		all = append(all, checkup.Found("file.exposed", severity, subject, "has mode %04o; it should be %04o at most", mode, f.most))
	}
	if too&0o022 != 0 {
		all = append(all, checkup.Found("file.writable", checkup.Warning, subject, "has mode %04o; it should be %04o at most", mode, f.most))
	}
	return all
}

func (e *exam) checkFolder(dir string, user int64) {
	info, err := os.Stat(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return // what should lie in it is missed already
	} else if err != nil {
		e.unchecked("folder "+dir, err)
		return
	}
	mode := info.Mode().Perm()
	if keys.Lent(info) { // a pod's volume
		mode &^= 0o020
	}
	var mount unix.Statfs_t
	if mode&0o022 != 0 && (unix.Statfs(dir, &mount) != nil || mount.Flags&unix.ST_RDONLY == 0) { // Kubernetes mounts Secrets so
		e.found("folder.writable", checkup.Warning, "folder "+dir, "has mode %04o; others can write to it", info.Mode().Perm())
	}
	if uid := ownerOf(info); uid != 0 && user >= 0 && int64(uid) != user {
		e.found("folder.writable", checkup.Warning, "folder "+dir, "belongs to %s, and the state to %s", owner(uid), owner(uint32(user)))
	}
}

// ownerOf returns the Unix user that a file belongs to.
func ownerOf(info fs.FileInfo) uint32 {
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		return st.Uid
	}
	return 0
}

// canWrite returns why this user could not append to a file, or make it. Nothing is opened.
func canWrite(path string) error {
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		dir := filepath.Dir(path)
		if info, err := os.Stat(dir); err != nil {
			return fmt.Errorf("its folder: %w", err)
		} else if !info.IsDir() {
			return fmt.Errorf("%s is no folder", dir)
		}
		if err := unix.Faccessat(unix.AT_FDCWD, dir, unix.W_OK|unix.X_OK, unix.AT_EACCESS); err != nil {
			return fmt.Errorf("its folder %s cannot be written to by %s: %w", dir, owner(uint32(os.Geteuid())), err)
		}
		return nil
	case err != nil:
		return err
	case info.IsDir():
		return errors.New("it is a folder; it should be a file")
	}
	if err := unix.Faccessat(unix.AT_FDCWD, path, unix.R_OK|unix.W_OK, unix.AT_EACCESS); err != nil {
		return fmt.Errorf("as %s: %w", owner(uint32(os.Geteuid())), err)
	}
	return nil
}

// changed returns when a file was last written; nil if that cannot be seen.
func changed(path string) *time.Time {
	info, err := os.Stat(path)
	if err != nil {
		return nil
	}
	t := info.ModTime()
	return &t
}

// readSmall reads a regular file of certificates or a token.
func readSmall(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil {
		return nil, err
	} else if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is not a regular file", path)
	}
	data, err := io.ReadAll(io.LimitReader(f, trust.MaxPEMBytes+1))
	if err == nil && len(data) > trust.MaxPEMBytes {
		err = fmt.Errorf("%s has more than %d bytes", path, trust.MaxPEMBytes)
	}
	return data, err
}
