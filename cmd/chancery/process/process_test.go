package process

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

type inner struct {
	Name  string  `json:"name"`
	Rate  float64 `json:"rate,omitempty"`
	Count int     `json:"count,omitempty"`
	On    bool    `json:"enabled,omitempty"`
}

type outer struct {
	Title string   `json:"title"`
	List  []inner  `json:"list,omitempty"`
	Words []string `json:"words,omitempty"`
	UIDs  []uint32 `json:"uids,omitempty"`
	One   *inner   `json:"one,omitempty"`
}

func TestDecodeConfigErrorsNameTheField(t *testing.T) {
	for _, c := range []struct{ yaml, want string }{
		{"titel: x", `there is no field "titel"; known are title, list, words, uids, one`},
		{"Title: x", `there is no field "Title"`},
		{"list: [{name: a}, {nam: b}]", `there is no field "list[1].nam"; known are name, rate, count, enabled`},
		{"one: {x/y: 1}", `there is no field "one.x/y"`},
		{"title: 3", "title should be text; put it in quotes"},
		{"list: {name: a}", "list should be a list"},
		{"list: [a]", "list[0] should be a group of fields, such as name, rate"},
		{"list: [{rate: fast}]", "list[0].rate should be a number"},
		{"list: [{count: 1.5}]", "list[0].count should be a whole number"},
		{"list: [{enabled: maybe}]", "list[0].enabled should be true or false"},
		{"uids: [-1]", "uids[0] should be a whole number from 0"},
		{"title: a\ntitle: b", `line 2: key "title" occurs twice`},
		{"- a", "it should hold fields, such as title, list"},
		{"a: b: c", "mapping values are not allowed"},
		{"title: x\n---\nbogus: 1", "line 3: a second YAML document begins"},
		{"---\ntitle: x\n...\n# and\n--- {bogus: 1}", "line 5: a second YAML document begins"},
	} {
		err := DecodeConfig([]byte(c.yaml), new(outer))
		if err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%q: got %v, want %q in one line", c.yaml, err, c.want)
		}
	}
	var o outer
	if err := DecodeConfig([]byte("title: x\nlist: [{name: a, rate: 2, count: 3, enabled: true}]\nuids: [0, 7]\n"), &o); err != nil {
		t.Fatal(err)
	}
	if o.Title != "x" || o.List[0] != (inner{"a", 2, 3, true}) || len(o.UIDs) != 2 {
		t.Errorf("got %+v", o)
	}
	for _, one := range []string{"---\ntitle: x\n---\n", "%YAML 1.1\n# c\n--- # d\ntitle: x\n...\n\n", "title: |\n  ---\n  x\n"} {
		if err := DecodeConfig([]byte(one), new(outer)); err != nil {
			t.Errorf("%q: %v", one, err)
		}
	}
}

func TestReadConfig(t *testing.T) {
	big := filepath.Join(t.TempDir(), "big.yaml")
	if err := os.WriteFile(big, make([]byte, maxConfig+1), 0o600); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{"": "use -c FILE", big: "larger than", "/nonexistent": "no such file", t.TempDir(): "is a directory"} {
		if _, err := ReadConfig(path); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: got %v, want %q", path, err, want)
		}
	}
}

func TestValues(t *testing.T) {
	for in, want := range map[string]time.Duration{"": 0, "90s": 90 * time.Second, "24h": 24 * time.Hour} {
		if d, err := Duration("f", in); err != nil || d != want {
			t.Errorf("%q: got %s, %v", in, d, err)
		}
	}
	for _, in := range []string{"90", "1d", "-1s", "x"} {
		if _, err := Duration("clusters[0].maxRenewalAge", in); err == nil || !strings.HasPrefix(err.Error(), "clusters[0].maxRenewalAge: ") || !strings.Contains(err.Error(), "like 90s") {
			t.Errorf("%q: got %v", in, err)
		}
	}
	for addr, ok := range map[string]bool{"127.0.0.1:0": true, ":8443": true, "[::1]:443": true, "host:x": false, "host": false, "1.2.3.4:99999": false, "": false} {
		if err := CheckAddress("listen", addr); (err == nil) != ok {
			t.Errorf("%q: got %v", addr, err)
		}
	}
	rel, abs, none := "a/b", "/c", ""
	t.Chdir(t.TempDir())
	if err := Absolute("conf/server.yaml", &rel, &abs, &none); err != nil {
		t.Fatal(err)
	}
	wd, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	if rel != filepath.Join(wd, "conf/a/b") || abs != "/c" || none != "" {
		t.Errorf("got %q %q %q", rel, abs, none)
	}
}

func TestProfilesOnLoopbackOnly(t *testing.T) {
	var missing error
	h := HTTP{Metrics: NewRegistry(), Ready: func() error { return missing }}
	get := func(host, path string) int {
		w := httptest.NewRecorder()
		h.handler(&net.TCPAddr{IP: net.ParseIP(host), Port: 1}).ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
		return w.Code
	}
	for host, want := range map[string]int{"127.0.0.1": 200, "::1": 200, "0.0.0.0": 404, "::": 404, "192.0.2.1": 404} {
		if got := get(host, "/debug/pprof/goroutine"); got != want {
			t.Errorf("profiles on %s: status %d, want %d", host, got, want)
		}
		if got := get(host, "/metrics"); got != 200 {
			t.Errorf("metrics on %s: status %d", host, got)
		}
	}
	if get("::", "/readyz") != 200 || get("::", "/healthz") != 200 {
		t.Error("not ready though nothing is missing")
	}
	missing = errors.New("something")
	if get("::", "/readyz") != 503 || get("::", "/healthz") != 200 {
		t.Error("ready though something is missing, or not healthy for it")
	}
}

// What a process lacks names files, keys and clusters: that is not for whoever reaches a public address.
func TestReasonsOnLoopbackOnly(t *testing.T) {
	h := HTTP{Metrics: NewRegistry(), Ready: func() error { return errors.New("key of issuer 4f2a: the token is gone") }}
	for host, told := range map[string]bool{"127.0.0.1": true, "::1": true, "0.0.0.0": false, "::": false, "192.0.2.1": false} {
		w := httptest.NewRecorder()
		h.handler(&net.TCPAddr{IP: net.ParseIP(host), Port: 1}).ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/readyz", nil))
		if got := strings.Contains(w.Body.String(), "token"); got != told || w.Code != 503 || !told && w.Body.String() != "not ready; the log says why\n" {
			t.Errorf("/readyz on %s: status %d, %q", host, w.Code, w.Body)
		}
	}
}

func TestEnded(t *testing.T) {
	running := t.Context()
	stopped, stop := context.WithCancel(running)
	stop()
	real := errors.New("disk full")
	for _, err := range []error{context.Canceled, fmt.Errorf("serving: %w", net.ErrClosed), grpc.ErrServerStopped, status.Error(codes.Canceled, "x"), nil} {
		if Ended(stopped, err) != nil {
			t.Errorf("%v counts as an error after the end", err)
		}
		if Ended(running, err) != err {
			t.Errorf("%v is lost before the end", err)
		}
	}
	if Ended(stopped, real) != real {
		t.Error("a real error is lost after the end")
	}
}

func TestSayStopping(t *testing.T) {
	var log bytes.Buffer
	logger := slog.New(slog.NewTextHandler(&log, nil))
	ctx, cancel := context.WithCancelCause(t.Context())
	SayStopping(ctx, logger)()
	end := SayStopping(ctx, logger)
	cancel(errors.New("terminated signal received"))
	end()
	if n := strings.Count(log.String(), `msg=stopping reason="terminated signal received"`); n != 1 {
		t.Errorf("said %d times: %s", n, log.String())
	}
}

func TestReplaceFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	if err := os.WriteFile(path+".new", []byte("of a crash"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{"one", "two"} {
		if err := ReplaceFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		data, err := os.ReadFile(path)
		info, _ := os.Stat(path)
		if err != nil || string(data) != text || info.Mode() != 0o600 {
			t.Errorf("got %q %v %v", data, info.Mode(), err)
		}
	}
	// What is public is so under any umask, and what is not is not.
	defer syscall.Umask(syscall.Umask(0o077))
	for _, mode := range []os.FileMode{0o644, 0o600} {
		if err := ReplaceFile(path, nil, mode); err != nil {
			t.Error(err)
		}
		if info, err := os.Stat(path); err != nil || info.Mode() != mode {
			t.Errorf("mode %v under umask 077, want %v: %v", info.Mode(), mode, err)
		}
	}
	// A link that somebody else put there is not followed.
	victim := filepath.Join(t.TempDir(), "victim")
	if err := errors.Join(os.WriteFile(victim, []byte("mine"), 0o600), os.Symlink(victim, path+".new")); err != nil {
		t.Fatal(err)
	}
	if err := ReplaceFile(path, []byte("three"), 0o600); err != nil {
		t.Error(err)
	}
	if data, err := os.ReadFile(victim); err != nil || string(data) != "mine" {
		t.Errorf("the file behind a link holds %q, %v", data, err)
	}
	if err := ReplaceFile("/nonexistent/f", nil, 0o600); err == nil || !strings.Contains(err.Error(), "/nonexistent/f") {
		t.Errorf("got %v", err)
	}
	if err := WriteAddrFile("", "x"); err != nil {
		t.Error(err)
	}
}

func TestOutput(t *testing.T) {
	if got := Printable("CN=a\x1b[2Jb\r\nc é"); got != "CN=a\uFFFD[2Jb\uFFFD\uFFFDc é" {
		t.Errorf("got %q", got)
	}
	if err := CheckFormat("xml", "text", "json"); err == nil || !strings.Contains(err.Error(), "use text, json") {
		t.Errorf("got %v", err)
	}
	for _, f := range []LogFlags{{"loud", "text"}, {"info", "xml"}} {
		if _, err := f.Logger(t.Output()); err == nil || !strings.Contains(err.Error(), "use ") {
			t.Errorf("%+v: got %v", f, err)
		}
	}
}

// TestBoundsOfHTTP: who does not send, or does not read, does not keep a connection for ever.
func TestBoundsOfHTTP(t *testing.T) {
	h := HTTP{Metrics: NewRegistry(), Ready: func() error { return nil }}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go h.Run(t.Context(), l)
	get := func(header int) (int, error) {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+l.Addr().String()+"/healthz", nil)
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("X-Large", strings.Repeat("x", header))
		resp, err := http.DefaultClient.Do(r)
		if err != nil {
			return 0, err
		}
		return resp.StatusCode, resp.Body.Close()
	}
	if code, err := get(8 << 10); code != 200 {
		t.Errorf("%d, %v", code, err)
	}
	if code, err := get(64 << 10); code != http.StatusRequestHeaderFieldsTooLarge && err == nil {
		t.Errorf("a header of 64 KiB: %d", code)
	}
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		pipes := &pipeListener{conns: make(chan net.Conn), done: make(chan struct{})}
		ended := make(chan error)
		go func() { ended <- h.Run(ctx, pipes) }()
		for sent, limit := range map[string]time.Duration{"": readTimeout, "GET /healthz HTTP/1.1\r\n": readTimeout, "GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n": writeTimeout} {
			client, server := net.Pipe()
			pipes.conns <- server
			start := time.Now()
			if _, err := client.Write([]byte(sent)); err != nil {
				t.Fatal(err)
			}
			time.Sleep(limit + time.Second) // without reading
			synctest.Wait()
			if _, err := io.Copy(io.Discard, client); err != nil && !errors.Is(err, io.ErrClosedPipe) {
				t.Errorf("%q: %v", sent, err)
			}
			if took := time.Since(start); took > limit+2*time.Second {
				t.Errorf("after %q the connection was kept for %s", sent, took)
			}
			client.Close()
		}
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

func TestListenNamesFieldAndAddress(t *testing.T) {
	l, err := Listen("metrics", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	addr := l.Addr().String()
	if _, err := Listen("metrics", addr); err == nil || err.Error() != "metrics: "+addr+" is in use; stop what listens there, or name another address" {
		t.Errorf("an address in use: %v", err)
	}
	if _, err := Listen("listen", "192.0.2.1:1"); err == nil || !strings.HasPrefix(err.Error(), "listen: ") {
		t.Errorf("an address of another machine: %v", err)
	}
}

// pipeListener accepts pipes.
type pipeListener struct {
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
}

func (l *pipeListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

func (l *pipeListener) Close() error { l.once.Do(func() { close(l.done) }); return nil }

func (l *pipeListener) Addr() net.Addr { return &net.UnixAddr{Name: "pipe", Net: "unix"} }
