package dev

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// hold keeps other dev processes out of a folder, before anything in it is touched. The kernel lets go of it with the
// process.
func hold(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, "dev.lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("holding the folder: %w", err)
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		owner := make([]byte, 20)
		n, _ := f.Read(owner)
		f.Close()
		return nil, held(dir, fmt.Errorf("another `chancery dev` runs there (pid %s)", strings.TrimSpace(string(owner[:n]))))
	}
	if err == nil {
		err = f.Truncate(0)
	}
	if err == nil {
		_, err = f.WriteString(strconv.Itoa(os.Getpid()) + "\n")
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("holding the folder %s: %w", dir, err)
	}
	return f, nil
}

// held says what to do about a folder that another process works in.
func held(dir string, why error) error {
	return fmt.Errorf("the folder %s is in use: %w. Use that one (chancery svid fetch --socket %s), stop it, or name another folder with --dir",
		dir, why, filepath.Join(dir, socketName))
}
