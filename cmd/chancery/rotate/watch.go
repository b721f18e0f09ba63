package rotate

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/chancery-project/chancery/cmd/chancery/process"
)

const (
	lookEvery = time.Second
	// silentFor is how long a watch goes on though the server does not answer: it may be starting again.
	silentFor = 5 * time.Minute
)

// watch follows a rotation to its end.
func (c *Asker) watch(ctx context.Context, out io.Writer) error {
	w := &watcher{name: c.name, format: c.format, out: out, screen: screenOf(out)}
	ticker := time.NewTicker(lookEvery)
	defer ticker.Stop()
	var failing time.Time // since when the server does not answer; zero: it does
	for first := true; ; first = false {
		r, err := c.status(ctx)
		switch {
		case err == nil:
			failing = time.Time{}
			if ended, err := w.show(statusOf(r)); ended || err != nil {
				return err
			}
		case ctx.Err() != nil:
			return ctx.Err()
		case first:
			return err
		default:
			if failing.IsZero() {
				failing = time.Now()
			}
			if time.Since(failing) > silentFor {
				return err
			}
			if err := w.silent(err); err != nil {
				return err
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-ticker.C:
		}
	}
}

// watcher shows one rotation as it goes on.
type watcher struct {
	name   string // of the command
	format string
	out    io.Writer
	screen *screen // nil where lines go that are not drawn over
	id     string  // of the rotation that is followed
	last   string  // what was printed last
}

// show shows what a server says, and reports whether the rotation has ended; the error is then how.
func (w *watcher) show(s statusJSON) (ended bool, err error) {
	if w.id == "" && s.Rotation != nil {
		w.id = s.Rotation.ID
	}
	if s.Rotation != nil && s.Rotation.ID == w.id {
		return false, w.tell(&s)
	}
	var x *rotationJSON
	for i := range s.Past {
		if w.id == "" || s.Past[i].ID == w.id {
			x = &s.Past[i]
			break
		}
	}
	if err := w.end(&s, x); err != nil {
		return true, err
	}
	switch {
	case x == nil && w.id != "":
		return true, fmt.Errorf("%s status: rotation %s has ended, and is so long ago that the server does not know how", w.name, w.id)
	case x != nil && x.Outcome != "done":
		return true, &process.ExitError{Code: 2, Err: fmt.Errorf("%s status: %s %s was %s", w.name, kindOf(x), x.ID, process.Printable(x.Outcome))}
	}
	return true, nil
}

// tell shows a rotation that is under way.
func (w *watcher) tell(s *statusJSON) error {
	switch {
	case w.format == "json":
		return w.object(s)
	case w.screen != nil:
		return w.screen.draw(table(s))
	}
	return w.line(s.Time, short(s))
}

// end shows how a rotation has ended; x is nil for none.
func (w *watcher) end(s *statusJSON, x *rotationJSON) error {
	var l lines
	switch {
	case w.format == "json":
		return w.object(s)
	case x == nil && w.id == "":
		l.add("No rotation is under way.")
	case x != nil:
		l.add("%s", pastLine(x))
		l = append(l, afterwards(x)...)
	}
	if w.screen != nil {
		if err := w.screen.draw(nil); err != nil { // the table is over; what stays is not cut
			return err
		}
	}
	return l.print(w.out)
}

// silent says that the server does not answer now.
func (w *watcher) silent(why error) error {
	text := process.Printable(fmt.Sprintf("no answer, trying again: %v", why))
	switch {
	case w.format == "json":
		return nil
	case w.screen != nil:
		below := w.screen.drawn
		err := w.screen.draw(append(slices.Clip(below), text))
		w.screen.drawn = below // else each try would leave a line
		return err
	}
	return w.line(time.Now(), text)
}

// line prints a line unless it is the last one again.
func (w *watcher) line(at time.Time, text string) error {
	if text == w.last {
		return nil
	}
	w.last = text
	_, err := fmt.Fprintf(w.out, "%s  %s\n", stamp(at), text)
	return err
}

// object prints a status as an object in a line, unless nothing but the clock has changed.
func (w *watcher) object(s *statusJSON) error {
	without := *s
	without.Time = time.Time{}
	if s.Rotation != nil {
		r := *s.Rotation
		r.Latest = nil // moves with the clock
		without.Rotation = &r
	}
	key, err := json.Marshal(without)
	if err != nil || string(key) == w.last {
		return err
	}
	w.last = string(key)
	return json.NewEncoder(w.out).Encode(s)
}

// screen draws lines over those that it drew before.
type screen struct {
	out   io.Writer
	size  func() (width, height int)
	drawn lines // those that were given last
	rows  int   // of the terminal that they took
}

// draw replaces what was drawn. Lines are folded to the terminal's width, or cut where there is no room for that: a row that breaks by
// itself would be counted as one.
func (s *screen) draw(l lines) error {
	width, height := s.size()
	var b bytes.Buffer
	if s.rows > 0 {
		fmt.Fprintf(&b, "\x1b[%dA", s.rows)
	}
	shown := l.fold(width)
	if len(shown) >= height {
		shown = l
	}
	if len(shown) >= height {
		shown = append(append(lines{}, shown[:height-2]...), fmt.Sprintf("... and %d more lines: the terminal is too small", len(l)-height+2))
	}
	for _, line := range shown {
		b.WriteString("\r" + cut(line, width) + "\x1b[K\n")
	}
	b.WriteString("\x1b[J") // what is left of a longer table
	s.drawn, s.rows = l, len(shown)
	_, err := s.out.Write(b.Bytes())
	return err
}

// fold breaks lines that are longer than a number of columns, between words. What follows is indented.
func (l lines) fold(width int) (all lines) {
	for _, line := range l {
		r := []rune(line)
		indent := 0
		for indent < len(r) && r[indent] == ' ' {
			indent++
		}
		if indent += 4; indent > width/2 {
			indent = 0
		}
		for len(r) > width {
			end := width
			for end > indent && r[end] != ' ' {
				end--
			}
			if end == indent { // one long word
				all, r = append(all, string(r[:width])), r[width:]
			} else {
				all, r = append(all, string(r[:end])), r[end+1:]
			}
			r = append([]rune(strings.Repeat(" ", indent)), r...)
		}
		all = append(all, string(r))
	}
	return all
}

// cut cuts a line to a number of columns, each rune taken for one.
func cut(line string, width int) string {
	r := []rune(line)
	if len(r) <= width {
		return line
	}
	return string(r[:width-1]) + "…"
}
