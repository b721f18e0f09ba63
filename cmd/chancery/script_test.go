package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"runtime/debug"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/chancery-project/chancery/ca/store/postgres/pgtest"
)

// TestMain makes this test binary the program that the scripts run.
func TestMain(m *testing.M) {
	testscript.Main(tests{m}, map[string]func(){"chancery": main})
}

type tests struct{ *testing.M }

// Run ends what tests share.
func (m tests) Run() int {
	defer pgtest.Stop()
	return m.M.Run()
}

// TestScripts runs testdata/script/*.txtar, each in a folder of its own, with the real command.
func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata/script",
		RequireExplicitExec: true,
		Setup: func(env *testscript.Env) error {
			// Without --dir, `chancery dev` works in here and not in the home of whoever runs the test.
			env.Setenv("XDG_STATE_HOME", filepath.Join(env.WorkDir, "state"))
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"until": until, "grepfile": grepFile, "metric": metric, "unixsocket": unixSocket,
		},
	})
}

// patience is how long until waits for what should take a moment, on a machine that does other things too.
const patience = 30 * time.Second

// until runs a program again and again until it succeeds, or with ! until it fails; its output is that of the last run.
func until(ts *testscript.TestScript, neg bool, args []string) {
	if len(args) == 0 {
		ts.Fatalf("usage: [!] until PROGRAM ARGS...")
	}
	for deadline := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		if err := ts.Exec(args[0], args[1:]...); (err != nil) == neg {
			return
		} else if time.Now().After(deadline) {
			ts.Fatalf("%s: not within %s: %v", strings.Join(args, " "), patience, err)
		}
	}
}

// grepFile waits until a file exists and has a match of the pattern, such as one that a program in the background writes.
func grepFile(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 2 {
		ts.Fatalf("usage: grepfile PATTERN FILE")
	}
	pattern := regexp.MustCompile("(?m)" + args[0])
	for deadline := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		data, err := os.ReadFile(ts.MkAbs(args[1]))
		if err == nil && pattern.Match(data) {
			return
		}
		if time.Now().After(deadline) {
			ts.Fatalf("%s has no %q within %s: %v\n%s", args[1], args[0], patience, err, data)
		}
	}
}

// metric waits until the process whose addrFile is given has a metric that matches the pattern.
func metric(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 2 {
		ts.Fatalf("usage: metric PATTERN ADDRFILE")
	}
	pattern := regexp.MustCompile("(?m)" + args[0])
	var last string
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		addrs, err := os.ReadFile(ts.MkAbs(args[1]))
		if err != nil {
			continue
		}
		_, rest, _ := strings.Cut(string(addrs), "metrics=")
		resp, err := http.Get("http://" + strings.TrimSpace(rest) + "/metrics")
		if err != nil {
			continue
		}
		data, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if last = string(data); err == nil && pattern.Match(data) {
			return
		}
	}
	ts.Fatalf("no metric %q within %s:\n%s", args[0], patience, last)
}

// unixSocket opens a socket that accepts connections and never answers, until the script ends. The first connection
// makes the file PATH.reached.
func unixSocket(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: unixsocket PATH")
	}
	path := ts.MkAbs(args[0])
	l, err := net.Listen("unix", path)
	ts.Check(err)
	done := make(chan error, 1)
	go func() {
		conn, err := l.Accept()
		if err == nil {
			defer conn.Close()
			err = os.WriteFile(path+".reached", []byte("yes"), 0o600)
		}
		done <- err
		_, _ = l.Accept() // until the listener is closed
	}()
	ts.Defer(func() {
		l.Close()
		ts.Check(<-done)
	})
}

// TestInterruptedIsNotDone: a command that was stopped before it did its work has failed.
func TestInterruptedIsNotDone(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	dir := t.TempDir()
	config := filepath.Join(dir, "server.yaml")
	text := "trustDomain: a\nstate: {sqlite: s}\nauditLog: l\nclusters: [{name: a, issuer: b, audiences: [c], jwksFile: d}]\n"
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	var stderr bytes.Buffer
	if code := run(ctx, []string{"authority", "init", "-c", config}, nil, &stderr, &stderr); code != 1 || stderr.String() != "chancery: interrupted\n" {
		t.Errorf("exit code %d, %q", code, stderr.String())
	}
	if _, err := os.Stat(filepath.Join(dir, "roots.pem")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("it made roots all the same: %v", err)
	}
}

func TestVersion(t *testing.T) {
	for want, info := range map[string]*debug.BuildInfo{
		"unknown":              nil,
		"devel, go1.27.3":      {GoVersion: "go1.27.3", Main: debug.Module{Version: "(devel)"}},
		"v1.2.3, go1.27.3":     {GoVersion: "go1.27.3", Main: debug.Module{Version: "v1.2.3"}},
		"v1, revision ab, go1": {GoVersion: "go1", Main: debug.Module{Version: "v1"}, Settings: []debug.BuildSetting{{Key: "vcs.revision", Value: "ab"}}},
		"devel, revision ab with changes, go1": {GoVersion: "go1", Settings: []debug.BuildSetting{
			{Key: "vcs.revision", Value: "ab"}, {Key: "vcs.modified", Value: "true"}}},
	} {
		if got := version(info); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}
