package process

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"
	"unicode"
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
	tmp := path + ".new"
	if err := os.Remove(tmp); err != nil && !errors.Is(err, fs.ErrNotExist) { // of a crash, maybe with another mode
		return fmt.Errorf("writing %s: %w", path, err)
	}
	f, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode) // EXCL: never through a link that others put there
	if err != nil {
		return fmt.Errorf("writing %s: %w", path, err)
	}
	err = f.Chmod(mode) // roots are public also where the umask says that nothing is
	if err == nil {
		_, err = f.Write(data)
	}
	if err == nil {
		err = f.Sync() // else a crash could leave the name with nothing in it
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("writing %s: %w", path, err)
	}
	if err := os.Rename(tmp, path); err != nil {
		return fmt.Errorf("writing %s: %w", path, err)
	}
	return nil
}
