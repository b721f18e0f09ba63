package rotate

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// terminal opens a pseudo terminal: what is written to the second file can be read from the first.
func terminal(t *testing.T, width, height uint16) (master, slave *os.File) {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { master.Close() })
	if err := unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	if slave, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { slave.Close() })
	if err := unix.IoctlSetWinsize(int(slave.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Col: width, Row: height}); err != nil {
		t.Fatal(err)
	}
	return master, slave
}

// TestWatchOnATerminal: the table is drawn over itself, in lines that fit; elsewhere there are no control characters.
func TestWatchOnATerminal(t *testing.T) {
	t.Setenv("TERM", "xterm")
	master, slave := terminal(t, 60, 30)
	w := &watcher{format: "text", out: slave, screen: screenOf(slave)}
	if w.screen == nil {
		t.Fatal("a terminal is not taken for one")
	}
	all := statuses("done")
	rows := 1 // of the end
	for _, s := range all {
		if _, err := w.show(s); err != nil {
			t.Fatal(err)
		}
		rows += w.screen.rows
	}
	read := make([]byte, 64<<10)
	var got string
	for strings.Count(got, "\n") < rows {
		n, err := master.Read(read)
		if err != nil {
			t.Fatal(err)
		}
		got += string(read[:n])
	}
	if n := strings.Count(got, fmt.Sprintf("\x1b[%dA", len(table(&all[0]).fold(60)))); n != 3 {
		t.Errorf("drawn over %d times, want 3:\n%q", n, got)
	}
	for _, line := range strings.Split(got, "\n") {
		line = strings.TrimRight(line, "\r")
		line = line[strings.LastIndexByte(line, '\r')+1:]
		if line = strings.TrimSuffix(line, "\x1b[K"); len([]rune(line)) > 60 && !strings.Contains(line, "done at") {
			t.Errorf("a line of %d columns: %q", len([]rune(line)), line)
		}
	}
	if !strings.Contains(got, "\x1b[J"+pastLine(&all[3].Past[0])) {
		t.Errorf("the end is not drawn:\n%q", got)
	}

	file, err := os.Create(t.TempDir() + "/out")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if screenOf(file) != nil {
		t.Error("a file is taken for a terminal")
	}
	t.Setenv("TERM", "dumb")
	if screenOf(slave) != nil {
		t.Error("a terminal that cannot move its cursor is drawn over")
	}
	t.Setenv("TERM", "xterm")
	if err := unix.IoctlSetWinsize(int(slave.Fd()), unix.TIOCSWINSZ, &unix.Winsize{}); err != nil {
		t.Fatal(err)
	}
	if width, height := screenOf(slave).size(); width != stdWidth || height != stdHeight {
		t.Errorf("without a size: %d x %d", width, height)
	}
}

// TestTableIsFolded: on a narrow terminal it can be read who is waited for, and why; only where there are too few rows lines are cut.
func TestTableIsFolded(t *testing.T) {
	l := lines{"short", "      - agent spiffe://td/a: its proxy says no", strings.Repeat("x", 45)}
	want := lines{"short", "      - agent spiffe://td/a:", "          its proxy says no", strings.Repeat("x", 30), "    " + strings.Repeat("x", 15)}
	if got := l.fold(30); !slices.Equal(got, want) {
		t.Errorf("got %q", got)
	}
	for height, fits := range map[int]bool{6: true, 5: false} {
		var out strings.Builder
		s := &screen{out: &out, size: func() (int, int) { return 30, height }}
		if err := s.draw(l); err != nil {
			t.Fatal(err)
		}
		if strings.Contains(out.String(), "proxy says no") != fits || strings.Contains(out.String(), "…") == fits {
			t.Errorf("%d rows: %q", height, out.String())
		}
	}
}
