package rotate

import (
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// Bounds of what a terminal says of its size: one that says nothing, or nonsense, counts as 80 by 24.
const (
	minWidth, minHeight = 20, 5
	stdWidth, stdHeight = 80, 24
)

// screenOf returns a screen on a terminal; nil if out is none, or one that cannot move its cursor.
func screenOf(out io.Writer) *screen {
	f, ok := out.(*os.File)
	if !ok || os.Getenv("TERM") == "dumb" || os.Getenv("TERM") == "" {
		return nil
	}
	if _, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS); err != nil {
		return nil
	}
	return &screen{out: f, size: func() (int, int) {
		size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ)
		if err != nil || size.Col < minWidth || size.Row < minHeight {
			return stdWidth, stdHeight
		}
		return int(size.Col), int(size.Row)
	}}
}
