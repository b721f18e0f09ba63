package consumers

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/chancery-project/chancery/ca/durable"
	"github.com/chancery-project/chancery/ca/durable/durabletest"
)

func open(t *testing.T, dir string) (*Table, string) {
	t.Helper()
	var log strings.Builder
	table, err := Open(Config{File: filepath.Join(dir, "consumers"), Logger: slog.New(slog.NewTextHandler(&log, nil))})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { table.Close() })
	return table, log.String()
}

// again opens the table as the next process would.
func (t *Table) again(tb *testing.T) (*Table, string) {
	tb.Helper()
	if err := t.Close(); err != nil {
		tb.Fatal(err)
	}
	return open(tb, filepath.Dir(t.file))
}

var issuer = []byte("an issuer's key ID")

func svid(name, version string, life time.Duration) SVID {
	return SVID{Name: name, Version: version, Issuer: issuer, Serial: "01", NotAfter: time.Now().Add(life)}
}

func hand(t *testing.T, s *Stream, v ...SVID) {
	t.Helper()
	if err := s.Hand(t.Context(), v); err != nil {
		t.Fatal(err)
	}
}

func acked(name, version string, contexts ...any) Observed {
	o := Observed{SVIDs: map[string]string{name: version}, Contexts: map[string]uint64{}}
	for i := 0; i < len(contexts); i += 2 {
		o.Contexts[contexts[i].(string)] = uint64(contexts[i+1].(int))
	}
	return o
}

// TestD1SurvivesARestart: the same process goes on in its row, another one with its PID does not; who is gone counts until its SVID
// ends; the table has the name that it had.
func TestD1SurvivesARestart(t *testing.T) {
	first, log := open(t, t.TempDir())
	if !strings.Contains(log, "a table of consumers is begun") {
		t.Errorf("it said %q", log)
	}
	a, b := Process{1000, 7, 100}, Process{1000, 8, 100}
	s := first.Join(a, "sds_delta")
	hand(t, s, svid("default", "v1", time.Hour))
	s.See(acked("default", "v1", "ROOTCA", 5))
	hand(t, first.Join(b, "sds_delta"), svid("default", "v1", time.Hour))
	if info, err := os.Stat(first.file); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", info, err)
	}
	if b := first.look(first.now(), 0); b != nil { // as each few seconds, and at the end
		<-b.done
	}

	next, log := first.again(t)
	if log != "" || next.id != first.id {
		t.Errorf("it is %x after %x and said %q", next.id, first.id, log)
	}
	if s := next.State(5); s.Consumers != 2 || s.Generation != 0 || len(s.Lagging) != 1 || !strings.Contains(s.Lagging[0].Name, "pid 8") {
		t.Errorf("after a restart it is %+v", s)
	}
	s = next.Join(a, "sds_delta")
	hand(t, s, svid("default", "v1", time.Hour))
	hand(t, next.Join(Process{1000, 7, 101}, "sds_delta"), svid("default", "v1", time.Hour))
	if n := next.State(5).Consumers; n != 3 {
		t.Errorf("%d consumers; another process with the PID of one is another", n)
	}
	s.See(acked("default", "v1", "ROOTCA", 0)) // a new stream that has not acknowledged yet: what the process had, it has
	if g := next.live[a].generation(); g != 5 {
		t.Errorf("generation %d after the stream came back", g)
	}
}

// TestD1LostTable: a table that is missing, or cannot be read, is another one, and it is said.
func TestD1LostTable(t *testing.T) {
	for name, content := range map[string]string{
		"empty": "", "no JSON": "x", "cut": `{"format":1,"agent":"00`, "unknown field": `{"format":1,"agent":"000102030405060708090a0b0c0d0e0f","rows":[],"more":1}`,
		"more after it": `{"format":1,"agent":"000102030405060708090a0b0c0d0e0f","rows":[]}{}`, "format": `{"format":2,"agent":"000102030405060708090a0b0c0d0e0f","rows":[]}`,
		"short ID": `{"format":1,"agent":"00","rows":[]}`, "row without SVIDs": `{"format":1,"agent":"000102030405060708090a0b0c0d0e0f","rows":[{"uid":0,"pid":1,"start":1,"count":1,"api":"x","svids":[]}]}`,
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			if err := os.WriteFile(filepath.Join(dir, "consumers"), []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
			table, log := open(t, dir)
			if !strings.Contains(log, "the table of consumers is lost") {
				t.Errorf("it said %q", log)
			}
			next, log := table.again(t)
			if log != "" || next.id != table.id {
				t.Errorf("the one that was begun is lost, too: %q", log)
			}
		})
	}
	table, _ := open(t, t.TempDir())
	if err := os.Remove(table.file); err != nil {
		t.Fatal(err)
	}
	if next, _ := table.again(t); next.id == table.id {
		t.Error("a table that is lost has the name of the one before")
	}
	if _, err := Open(Config{File: filepath.Join(t.TempDir(), "no", "folder")}); err == nil {
		t.Error("a file that cannot be written was taken")
	}
}

// TestD1NoSVIDIsServedThatIsNotOnDisk fails each step of a write in each way, and crashes after each: what Hand let through is in the
// file, always; what it refused may be served later.
func TestD1NoSVIDIsServedThatIsNotOnDisk(t *testing.T) {
	p := Process{1, 2, 3}
	work := func(dir string, mark func(string)) error {
		table, err := Open(Config{File: filepath.Join(dir, "consumers")})
		if err != nil {
			return err
		}
		defer table.Close()
		s := table.Join(p, "sds_delta")
		for i, version := range []string{"v1", "v2", "v3"} {
			if err := s.Hand(t.Context(), []SVID{svid("default", version, time.Hour)}); err != nil {
				// The next try, when the disk is well.
				if err := s.Hand(t.Context(), []SVID{svid("default", version, time.Hour)}); err != nil {
					continue
				}
			}
			mark(version)
			if i == 1 {
				s.See(acked("default", version, "ROOTCA", 5))
			}
		}
		return nil
	}
	check := func(name, dir string, served map[string]bool) {
		table, err := Open(Config{File: filepath.Join(dir, "consumers")})
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		defer table.Close()
		var has []string
		if c := table.live[p]; c != nil {
			for _, h := range c.SVIDs {
				has = append(has, h.Version)
			}
		}
		last := ""
		for _, v := range []string{"v1", "v2", "v3"} {
			if served[v] {
				last = v
			}
		}
		// v2 was acknowledged: v1 may be gone by then.
		if last != "" && !strings.Contains(fmt.Sprint(has), last) || last == "v1" && len(has) == 0 {
			t.Errorf("%s: served were %v, the file has %v", name, served, has)
		}
	}
	one := func(n int, mode durabletest.Mode) int {
		dir := t.TempDir()
		d := durabletest.Watch(t, dir)
		d.FailAt(n, mode)
		served := map[string]bool{}
		err := work(dir, func(v string) { served[v] = true })
		if err == nil && !d.Dead() && len(served) != 3 {
			t.Errorf("%s: only %v were served, though the disk was well again", d.Failed(), served)
		}
		check(d.Failed(), d.Copy(), served)
		return d.Steps()
	}
	total := one(-1, "")
	for n := range total {
		for _, mode := range durabletest.Modes {
			one(n, mode)
		}
	}
	dir := t.TempDir()
	d := durabletest.Watch(t, dir)
	if err := work(dir, func(v string) { d.Mark(v) }); err != nil {
		t.Fatal(err)
	}
	d.Crashes(1, func(_ bool, left *durabletest.Left) {
		served := map[string]bool{}
		for _, m := range left.Marks {
			served[m.(string)] = true
		}
		check(left.String(), left.Dir, served)
	})
}

// TestD1KillInTheMiddle kills a process that hands out SVIDs as fast as it can: whatever it said it served is in the file.
func TestD1KillInTheMiddle(t *testing.T) {
	if dir := os.Getenv("CHANCERY_TEST_CONSUMERS"); dir != "" {
		table, err := Open(Config{File: filepath.Join(dir, "consumers")})
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		for i := 0; ; i++ {
			p := Process{1, int32(i), 3}
			if err := table.Join(p, "sds_delta").Hand(context.Background(), []SVID{svid("default", fmt.Sprint("v", i), time.Hour)}); err != nil {
				fmt.Println(err)
				os.Exit(1)
			}
			fmt.Println("served", i)
		}
	}
	dir := t.TempDir()
	cmd := exec.Command(os.Args[0], "-test.run=TestD1KillInTheMiddle")
	cmd.Env = append(os.Environ(), "CHANCERY_TEST_CONSUMERS="+dir)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	last := -1
	for last < 50 {
		var n int
		if _, err := fmt.Fscanf(out, "served %d\n", &n); err != nil {
			t.Fatalf("after %d: %v", last, err)
		}
		last = n
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	for {
		var n int
		if _, err := fmt.Fscanf(out, "served %d\n", &n); err != nil {
			break
		}
		last = n
	}
	cmd.Wait() // killed
	table, log := open(t, dir)
	if log != "" {
		t.Errorf("after kill -9: %s", log)
	}
	for i := range last + 1 {
		if table.live[Process{1, int32(i), 3}] == nil {
			t.Fatalf("of %d that were served the file lacks %d", last+1, i)
		}
	}
}

// Many that come at once share a write.
func TestAWriteIsShared(t *testing.T) {
	dir := t.TempDir()
	table, _ := open(t, dir)
	writes := 0
	release := make(chan struct{})
	remove := durable.Inject(dir, func(s durable.Step, do func(int) error) error {
		if s.Kind == durable.Rename {
			writes++
			if writes == 1 {
				<-release
			}
		}
		return do(-1)
	})
	defer remove()
	errs := make(chan error)
	const n = 200
	for i := range n {
		go func() {
			errs <- table.Join(Process{1, int32(i), 1}, "sds_delta").Hand(context.Background(), []SVID{svid("default", "v", time.Hour)})
		}()
	}
	for { // until all have entered theirs
		table.mu.Lock()
		entered := table.count()
		table.mu.Unlock()
		if entered == n {
			break
		}
		time.Sleep(time.Millisecond)
	}
	for {
		table.mu.Lock()
		all := 0
		for _, c := range table.live {
			all += len(c.SVIDs)
		}
		table.mu.Unlock()
		if all == n {
			break
		}
		time.Sleep(time.Millisecond)
	}
	close(release)
	for range n {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	if writes > 3 {
		t.Errorf("%d writes for %d at once", writes, n)
	}
}

// TestD1Ends: a row ends with its last SVID, and a context that a process has given up is not waited for.
func TestD1Ends(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table, _ := open(t, t.TempDir())
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- table.Run(ctx) }()
		p := Process{1, 2, 3}
		s, roots, other := table.Join(p, "sds_delta"), table.Join(p, "sds_delta"), table.Join(p, "sds_delta")
		hand(t, s, svid("default", "v1", time.Hour))
		s.See(acked("default", "v1"))
		roots.See(Observed{Contexts: map[string]uint64{"ROOTCA": 6}})
		other.See(Observed{Contexts: map[string]uint64{"service:a/b": 5}})
		if g := table.State(6).Generation; g != 5 {
			t.Errorf("generation %d of 6 and 5", g)
		}
		other.Leave()
		time.Sleep(time.Minute)
		if g := table.State(6).Generation; g != 5 {
			t.Errorf("generation %d a minute after a stream broke", g)
		}
		time.Sleep(2 * time.Minute)
		if g := table.State(6).Generation; g != 6 {
			t.Errorf("generation %d though the process does not ask for the other context", g)
		}
		roots.Leave()
		s.Leave()
		changed := table.Changed()
		time.Sleep(50 * time.Minute)
		if s := table.State(7); s.Consumers != 1 || s.Generation != 6 {
			t.Errorf("not connected: %+v", s)
		}
		time.Sleep(10 * time.Minute)
		<-changed
		if s := table.State(7); s.Consumers != 0 || !s.Until.IsZero() || len(s.Held) != 0 {
			t.Errorf("after its end: %+v", s)
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if data, err := os.ReadFile(table.file); err != nil || strings.Contains(string(data), `"uid"`) {
			t.Errorf("the file has %s, %v", data, err)
		}
	})
}

// TestD1AClockThatIsSetAhead and back again makes nobody forget what consumers have: none of them has gone meanwhile.
func TestD1AClockThatIsSetAhead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table, _ := open(t, t.TempDir())
		s := table.Join(Process{1, 2, 3}, "sds_delta")
		hand(t, s, svid("default", "v1", time.Hour))
		s.See(acked("default", "v1", "ROOTCA", 5))
		set := func(table *Table, when string) {
			ahead := table.now()
			ahead.wall = ahead.wall.Add(2 * time.Hour)
			if b := table.look(ahead, 0); b != nil {
				<-b.done
			}
			if s := table.State(6); s.Consumers != 1 || s.Generation != 5 || len(s.Held) != 1 {
				t.Errorf("%s: the clock was two hours ahead for a moment, and there are %+v", when, s)
			}
		}
		set(table, "handed out")
		next, _ := table.again(t)
		set(next, "read from the file")
		time.Sleep(time.Hour)
		if s := next.State(6); s.Consumers != 0 {
			t.Errorf("after its end: %+v", s)
		}
	})
}

// TestD1ManyThatCameAndWent are counted together, for as long and with what they would have counted alone.
func TestD1ManyThatCameAndWent(t *testing.T) {
	table, _ := open(t, t.TempDir())
	remove := durabletest.WithoutSyncs(filepath.Dir(table.file))
	defer remove()
	end := time.Now()
	for i := range maxApart + 10 {
		s := table.Join(Process{uint32(i % 2), int32(i), 1}, "workload_x509_svid")
		v := svid("x", "v", time.Hour+time.Duration(i)*time.Second)
		end = v.NotAfter
		hand(t, s, v)
		s.See(acked("x", "v", "x", 3+i%5))
		s.Leave()
	}
	table.look(table.now(), time.Hour)
	if n := table.count(); n != 2 {
		t.Errorf("%d rows", n)
	}
	s := table.State(9)
	if s.Consumers != maxApart+10 || s.Generation != 3 || !s.Until.Equal(end) || len(s.Held) != 1 || s.Held[0].Consumers != maxApart+10 {
		t.Errorf("together they are %+v", s)
	}
	if b := table.look(table.now(), 0); b != nil {
		<-b.done
	}
	next, log := table.again(t)
	if got := next.State(9); got.Consumers != s.Consumers || got.Generation != 3 || log != "" {
		t.Errorf("after a restart they are %+v: %s", got, log)
	}
}

// A consumer that never acknowledges does not make the table grow for ever.
func TestSVIDsOfOneConsumerAreBounded(t *testing.T) {
	table, _ := open(t, t.TempDir())
	defer durabletest.WithoutSyncs(filepath.Dir(table.file))()
	s := table.Join(Process{1, 2, 3}, "sds_delta")
	for i := range 3 * maxSVIDs {
		hand(t, s, svid("default", fmt.Sprint("v", i), time.Hour+time.Duration(i)*time.Second))
	}
	if n := len(s.of.SVIDs); n != maxSVIDs {
		t.Errorf("%d SVIDs", n)
	}
	for i := range maxSVIDs {
		v := svid("default", fmt.Sprint("w", i), time.Hour)
		v.Issuer = fmt.Append(nil, "issuer ", i)
		if err := s.Hand(t.Context(), []SVID{v}); err != nil {
			if i < maxSVIDs-2 {
				t.Fatalf("issuer %d: %v", i, err)
			}
			return
		}
	}
	t.Error("there is no bound")
}

// One file has one agent.
func TestOneAgentHasTheFile(t *testing.T) {
	table, _ := open(t, t.TempDir())
	if _, err := Open(Config{File: table.file}); err == nil || !strings.Contains(err.Error(), "held by another agent") {
		t.Errorf("got %v", err)
	}
	if err := errors.Join(table.Close()); err != nil {
		t.Fatal(err)
	}
	if next, err := Open(Config{File: table.file}); err != nil {
		t.Error(err)
	} else {
		next.Close()
	}
}

// Whatever the file holds makes an error or a table that is written again as it is.
func FuzzLoad(f *testing.F) {
	f.Add([]byte(`{"format":1,"agent":"000102030405060708090a0b0c0d0e0f","rows":[{"uid":0,"pid":1,"start":1,"count":1,"api":"x","svids":[{"name":"n","version":"v","issuer":"00","serial":"1","notAfter":"2026-01-01T00:00:00Z"}],"contexts":[{"name":"ROOTCA","generation":3}]}]}`))
	f.Add([]byte(`{"format":1,"agent":"","rows":null}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		a := &Table{live: map[Process]*consumer{}, changed: make(chan struct{})}
		if a.load(data) != nil {
			return
		}
		a.State(5)
		again, _, err := a.encode()
		if err != nil {
			t.Fatal(err)
		}
		b := &Table{live: map[Process]*consumer{}, changed: make(chan struct{})}
		if err := b.load(again); err != nil {
			t.Fatalf("%s is not read again: %v", again, err)
		}
	})
}

// TestD1ARejectionStands: what a consumer rejected is known in its words, over restarts, and makes it unknown, until it takes that or
// gives it up; what it takes beside it changes nothing. Envoy rejects the later of a certificate and a context that do not go together.
func TestD1ARejectionStands(t *testing.T) {
	first, _ := open(t, t.TempDir())
	p := Process{1000, 7, 100}
	s, roots := first.Join(p, "sds_delta"), first.Join(p, "sds_delta")
	hand(t, s, svid("default", "v1", time.Hour))
	roots.See(Observed{Contexts: map[string]uint64{"ROOTCA": 5}, Taken: []string{"ROOTCA"}})
	no := Observed{SVIDs: map[string]string{"default": ""}, Rejected: map[string]string{"default": "Invalid hash"}}
	s.See(no)
	roots.See(Observed{Contexts: map[string]uint64{"ROOTCA": 6}, Taken: []string{"ROOTCA"}})
	is := func(table *Table, generation uint64, why string) {
		t.Helper()
		got := table.State(6)
		if got.Generation != generation || (why == "") != (len(got.Lagging) == 0) || why != "" && !strings.Contains(got.Lagging[0].Why, why) {
			t.Errorf("it is %+v", got)
		}
	}
	is(first, 0, "it rejected default: Invalid hash")
	if b := first.look(first.now(), 0); b != nil {
		<-b.done
	}
	next, _ := first.again(t)
	is(next, 0, "it rejected default: Invalid hash")
	roots, s = next.Join(p, "sds_delta"), next.Join(p, "sds_delta")
	roots.See(Observed{Contexts: map[string]uint64{"ROOTCA": 6}, Taken: []string{"ROOTCA"}})
	is(next, 0, "it rejected default")
	s.See(Observed{SVIDs: map[string]string{"default": "v1"}, Taken: []string{"default"}})
	is(next, 6, "")
	s.See(no)
	is(next, 0, "it rejected default")
	s.See(Observed{}) // it asks for it no more
	is(next, 6, "")
	for i := range 3 * maxRejected {
		s.See(Observed{Rejected: map[string]string{fmt.Sprint("service:", i): strings.Repeat("no", maxWords)}, Contexts: map[string]uint64{fmt.Sprint("service:", i): 0}})
	}
	if n := len(next.live[p].Rejected); n > maxRejected+1 {
		t.Errorf("%d rejections are kept", n)
	}
	is(next, 0, "it rejected service:")
}
