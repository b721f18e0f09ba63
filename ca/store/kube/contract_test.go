package kube

import (
	"net/url"
	"path/filepath"
	"sort"
	"testing"

	"k8s.io/client-go/tools/clientcmd"

	"github.com/chancery-project/chancery/ca/store"
	"github.com/chancery-project/chancery/ca/store/storetest"
)

// TestKubernetes: the contract of stores holds, with a real API server and etcd.
func TestKubernetes(t *testing.T) {
	t.Parallel()
	k := server(t)
	storetest.Run(t, storetest.Config{
		Name:        DefaultName,
		MaxDocument: mostNoise(t),
		MaxNote:     MaxNote,
		New: func(t *testing.T) func(*testing.T) store.Store {
			c := namespace(t, k)
			create(t, c)
			return func(t *testing.T) store.Store { return open(t, c) }
		},
		Cut: func(t *testing.T) (*storetest.Proxy, store.Store, store.Store) {
			c := namespace(t, k)
			second := create(t, c)
			proxy, over := through(t, c)
			return proxy, open(t, over), second
		},
	})
}

// through is a config that reaches the API server through a proxy.
func through(t *testing.T, c Config) (*storetest.Proxy, Config) {
	t.Helper()
	cfg, err := clientcmd.LoadFromFile(c.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	u, err := url.Parse(cfg.Clusters["e2e"].Server)
	if err != nil {
		t.Fatal(err)
	}
	proxy := storetest.NewProxy(t, "tcp", u.Host)
	cfg.Clusters["e2e"].Server = "https://" + proxy.Addr
	c.Kubeconfig = filepath.Join(t.TempDir(), "kubeconfig")
	if err := clientcmd.WriteToFile(*cfg, c.Kubeconfig); err != nil {
		t.Fatal(err)
	}
	return proxy, c
}

// mostNoise is the size of the largest document that fits, of those that gzip cannot make smaller.
func mostNoise(t *testing.T) int {
	t.Helper()
	data := noise(1 << 20)
	n := sort.Search(len(data), func(n int) bool {
		_, err := pack(1, data[:n])
		return err != nil
	}) - 1
	if n < 1<<20-1000 {
		t.Fatalf("only %d bytes of noise fit into a Secret", n)
	}
	return n
}
