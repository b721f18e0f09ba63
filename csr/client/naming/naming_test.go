package naming

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca/durable/durabletest"
)

func said(name string, ids ...string) *chanceryv1.ServiceIdentities {
	return &chanceryv1.ServiceIdentities{Service: name, SpiffeIds: ids}
}

func unknown(name string) *chanceryv1.ServiceIdentities {
	return &chanceryv1.ServiceIdentities{Service: name, Unknown: true}
}

// text is what is known.
func (t *Table) text() string {
	known, _ := t.Known()
	var out []string
	for _, name := range slices.Sorted(maps.Keys(known)) {
		var ids []string
		for _, id := range known[name] {
			ids = append(ids, id.String())
		}
		out = append(out, name+"="+strings.Join(ids, ","))
	}
	return strings.Join(out, " ")
}

func (t *Table) askedFor() string {
	asked, _ := t.Asked()
	return strings.Join(asked, " ")
}

func (t *Table) take(x *testing.T, want string, all ...*chanceryv1.ServiceIdentities) {
	x.Helper()
	was := t.text()
	_, changed := t.Known()
	t.Take(all)
	if t.text() != want {
		x.Errorf("known is %q; want %q", t.text(), want)
	}
	select {
	case <-changed:
		if was == want {
			x.Error("nothing is new, and everybody is woken")
		}
	default:
		if was != want {
			x.Error("nobody is woken")
		}
	}
}

func hold(x *testing.T, t *Table, names ...string) {
	x.Helper()
	for _, name := range names {
		if err := t.Hold(name); err != nil {
			x.Fatal(err)
		}
	}
}

// TestD26TheLastWordStands until another one comes: of what was never said nothing is known, and silence is no word, nor is what cannot be
// read.
func TestD26TheLastWordStands(t *testing.T) {
	var log strings.Builder
	n := Open(Config{Logger: slog.New(slog.NewTextHandler(&log, nil))})
	hold(t, n, "foo/web", "foo/api")
	n.take(t, "", said("foo/other", "spiffe://td/a")) // nobody asks for that
	n.take(t, "foo/web=spiffe://td/a,spiffe://td/b", said("foo/web", "spiffe://td/a", "spiffe://td/b"))
	n.take(t, "foo/web=spiffe://td/a,spiffe://td/b")
	n.take(t, "foo/web=spiffe://td/a,spiffe://td/b", said("foo/web", "spiffe://td/a", "spiffe://td/b"))
	n.take(t, "foo/api= foo/web=spiffe://td/a,spiffe://td/b", unknown("foo/api"))
	for range 2 {
		n.take(t, "foo/api= foo/web=spiffe://td/a,spiffe://td/b", said("foo/web", "spiffe://td/c", "nonsense"))
	}
	if got := strings.Count(log.String(), "is refused; what was said before stands"); got != 1 {
		t.Errorf("it is said %d times that something is refused: %s", got, &log)
	}
	both := unknown("foo/web")
	both.SpiffeIds = []string{"spiffe://td/c"}
	var many []string
	for i := range maxIdentities + 1 {
		many = append(many, fmt.Sprintf("spiffe://td/%d", i))
	}
	n.take(t, "foo/api= foo/web=spiffe://td/a,spiffe://td/b", both, said("foo/web", many...))
	n.take(t, "foo/api=spiffe://td/x foo/web=", said("foo/api", "spiffe://td/x"), said("foo/web"))
}

// A service is asked for from the moment that somebody wants it until a while after the last one does; many at once are told in one.
func TestWhatIsAskedFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := Open(Config{})
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go n.Run(ctx)
		_, told := n.Asked()
		start := time.Now()
		hold(t, n, "foo/b", "foo/a", "foo/b")
		<-told
		if since := time.Since(start); since > 100*time.Millisecond || n.askedFor() != "foo/a foo/b" {
			t.Errorf("after %s asked for is %q", since, n.askedFor())
		}
		_, told = n.Asked()
		hold(t, n, "foo/a") // nothing new
		n.Take([]*chanceryv1.ServiceIdentities{said("foo/a", "spiffe://td/a"), said("foo/b", "spiffe://td/b")})
		n.Drop("foo/a")
		n.Drop("foo/b")
		time.Sleep(2 * linger)
		select {
		case <-told:
			t.Error("something was told")
		default:
		}
		n.Drop("foo/b")
		time.Sleep(linger / 2)
		if n.askedFor() != "foo/a foo/b" || n.text() != "foo/a=spiffe://td/a foo/b=spiffe://td/b" {
			t.Errorf("for a while asked for is %q, known %q", n.askedFor(), n.text())
		}
		time.Sleep(linger)
		if <-told; n.askedFor() != "foo/a" || n.text() != "foo/a=spiffe://td/a" {
			t.Errorf("then asked for is %q, known %q", n.askedFor(), n.text())
		}
		hold(t, n, "foo/b")
		if n.text() != "foo/a=spiffe://td/a" {
			t.Errorf("who asks again is told %q", n.text())
		}
	})
}

// Whoever wants a service again at the moment at which it is forgotten has what is known of it: servers, who are not asked anew, would not say it again.
func TestAServiceIsWantedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := Open(Config{})
		hold(t, n, "foo/a", "foo/b")
		n.askedFor()
		n.Take([]*chanceryv1.ServiceIdentities{said("foo/a", "spiffe://td/a"), said("foo/b", "spiffe://td/b")})
		n.Drop("foo/a")
		n.Drop("foo/b")
		time.Sleep(linger)
		n.sweep(time.Now())
		n.sweep(time.Now())
		n.Take([]*chanceryv1.ServiceIdentities{said("foo/a", "spiffe://td/new")}) // they do not know yet
		hold(t, n, "foo/a")
		if n.askedFor() != "foo/a" || n.text() != "foo/a=spiffe://td/new" {
			t.Errorf("asked for is %q, known %q", n.askedFor(), n.text())
		}
		hold(t, n, "foo/b")
		if n.askedFor() != "foo/a foo/b" || n.text() != "foo/a=spiffe://td/new" {
			t.Errorf("asked for is %q, known %q", n.askedFor(), n.text())
		}
		for i := range 3 * maxServices { // whom no server is asked for
			name := fmt.Sprintf("churn/%d", i)
			hold(t, n, name)
			n.Drop(name)
		}
		if len(n.all) > maxServices || n.leaving != 0 {
			t.Errorf("%d services are kept, %d about to go", len(n.all), n.leaving)
		}
		time.Sleep(time.Second)
	})
}

func TestThereIsRoomForSoMany(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := Open(Config{})
		for i := range maxServices {
			hold(t, n, fmt.Sprintf("foo/%04d", i))
			time.Sleep(time.Millisecond)
		}
		if err := n.Hold("foo/more"); err == nil || !strings.Contains(err.Error(), "2000 services are asked for already") {
			t.Errorf("one too many: %v", err)
		}
		n.Drop("foo/0007")
		time.Sleep(time.Second)
		n.Drop("foo/0003")
		hold(t, n, "foo/more") // in the place of who is wanted by nobody for longest
		if asked := n.askedFor(); strings.Contains(asked, "foo/0007") || !strings.Contains(asked, "foo/0003") || !strings.Contains(asked, "foo/more") {
			t.Error("the wrong one has given way")
		}
		for _, bad := range []string{"", "foo", "/a", "a/", "a/b/c", "a/b c", "a/\x00", "a/" + strings.Repeat("x", maxService)} {
			if n.Hold(bad) == nil {
				t.Errorf("%.30q is asked for", bad)
			}
		}
		synctest.Wait()
		time.Sleep(time.Second) // for what is about to be told
	})
}

// TestD26TheLastWordIsKept over restarts, and asked for anew.
func TestD26TheLastWordIsKept(t *testing.T) {
	file := filepath.Join(t.TempDir(), "naming")
	n := Open(Config{File: file})
	hold(t, n, "foo/web", "foo/none", "foo/silent")
	n.take(t, "foo/none= foo/web=spiffe://td/a", said("foo/web", "spiffe://td/a"), unknown("foo/none"))
	n.save()
	info, err := os.Stat(file)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the file: %v, %v", info, err)
	}
	n = Open(Config{File: file})
	if n.text() != "foo/none= foo/web=spiffe://td/a" || n.askedFor() != "foo/none foo/web" {
		t.Errorf("after a restart known is %q, asked for %q", n.text(), n.askedFor())
	}
	for _, bad := range []string{
		``, `{}`, `{"format":2,"services":[]}`, `{"format":1,"services":[{"name":"foo","identities":[]}]}`, `{"format":1,"services":[]} x`,
		`{"format":1,"services":[{"name":"foo/a","identities":["x"]}]}`, `{"format":1,"services":[{"name":"a/b","identities":[]},{"name":"a/b","identities":[]}]}`,
		`{"format":1,"more":1,"services":[]}`, `{"format":1,"services":[{"name":"a/b","identities":[]}` + strings.Repeat(`,{}`, maxServices) + `]}`,
	} {
		if err := os.WriteFile(file, []byte(bad), 0o600); err != nil {
			t.Fatal(err)
		}
		var log strings.Builder
		n := Open(Config{File: file, Logger: slog.New(slog.NewTextHandler(&log, nil))})
		if n.text() != "" || n.askedFor() != "" || !strings.Contains(log.String(), "is of no use") {
			t.Errorf("%.40q is taken: %q, %s", bad, n.text(), &log)
		}
	}
}

// TestFaultsOfTheFile: whatever fails, the file has the word before or the new one.
func TestFaultsOfTheFile(t *testing.T) {
	in := func(dir string) *Table { return Open(Config{File: filepath.Join(dir, "naming")}) }
	one := func(n int, mode durabletest.Mode) int {
		dir := t.TempDir()
		x := in(dir)
		hold(t, x, "foo/web")
		x.Take([]*chanceryv1.ServiceIdentities{said("foo/web", "spiffe://td/a")})
		x.save()
		w := durabletest.Watch(t, dir)
		w.FailAt(n, mode)
		x.Take([]*chanceryv1.ServiceIdentities{said("foo/web", "spiffe://td/b")})
		x.save()
		if got := in(w.Copy()).text(); got != "foo/web=spiffe://td/a" && got != "foo/web=spiffe://td/b" {
			t.Errorf("%s: the file has %q", w.Failed(), got)
		}
		if !w.Dead() {
			x.save()
			if got := in(w.Copy()).text(); got != "foo/web=spiffe://td/b" {
				t.Errorf("%s: it is not mended: %q", w.Failed(), got)
			}
		}
		return w.Steps()
	}
	total := one(-1, "")
	for n := range total {
		for _, mode := range durabletest.Modes {
			one(n, mode)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(`{"format":1,"services":[{"name":"foo/web","identities":["spiffe://td/a"]},{"name":"foo/none","identities":[]}]}`))
	f.Add([]byte(`{"format":1}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		n := Open(Config{})
		if n.parse(data) != nil {
			return
		}
		known, _ := n.Known()
		for name, ids := range known {
			if !Valid(name) || ids == nil || len(ids) > maxIdentities {
				t.Errorf("%q: %v", name, ids)
			}
		}
	})
}
