package kube

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"

	"github.com/chancery-project/chancery/test/apiserver"
	"github.com/chancery-project/chancery/test/process"
)

// shared is the API server of all tests that do it no harm.
var shared struct {
	sync.Mutex // guards the rest
	server     *apiserver.Server
	dir        string
	err        error
}

func TestMain(m *testing.M) {
	utilruntime.ErrorHandlers = nil // one sleeps by the clock of a synctest bubble
	code := m.Run()
	if shared.server != nil {
		shared.server.Stop()
	}
	os.RemoveAll(shared.dir)
	os.Exit(code)
}

func server(t testing.TB) *apiserver.Server {
	t.Helper()
	cfg := apiserver.Config{APIServer: process.Tool(t, "kube-apiserver"), Etcd: process.Tool(t, "etcd")}
	shared.Lock()
	defer shared.Unlock()
	if shared.server == nil && shared.err == nil {
		if shared.dir, shared.err = os.MkdirTemp("", "kubestore-"); shared.err == nil {
			cfg.Dir = shared.dir
			shared.server, shared.err = apiserver.Launch(cfg)
		}
	}
	if shared.err != nil {
		t.Fatal(shared.err)
	}
	return shared.server
}

// namespace makes one and returns a config for it.
func namespace(t testing.TB, s *apiserver.Server) Config {
	t.Helper()
	ns, err := s.Client.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "state-"}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return Config{Namespace: ns.Name, Kubeconfig: s.AdminKubeconfig}
}

func create(t testing.TB, c Config) *Store {
	t.Helper()
	s, err := Create(t.Context(), c, logger(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func open(t testing.TB, c Config) *Store {
	t.Helper()
	s, err := Open(t.Context(), c, logger(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func logger(t testing.TB) *slog.Logger {
	t.Helper()
	return newFile(t).logger
}

// logFile is a log in a file, since a watch may log after its test has ended; a failed test shows it.
type logFile struct {
	path   string
	logger *slog.Logger
}

func newFile(t testing.TB) logFile {
	t.Helper()
	path := filepath.Join(t.TempDir(), "log")
	f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		f.Close()
		if data, err := os.ReadFile(path); t.Failed() && err == nil {
			t.Logf("the store's log:\n%s", data)
		}
	})
	return logFile{path, slog.New(slog.NewTextHandler(f, nil))}
}

// has returns nil if a text is there n times.
func (l logFile) has(t testing.TB, text string, n int) error {
	t.Helper()
	data, err := os.ReadFile(l.path)
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.Count(string(data), text); got != n {
		return fmt.Errorf("%q is there %d times; want %d", text, got, n)
	}
	return nil
}
