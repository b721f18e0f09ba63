package secret

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"io"
	"runtime"
	"sync"
	"weak"

	tlsv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/transport_sockets/tls/v3"
	"google.golang.org/protobuf/types/known/anypb"
)

// Resource is one secret under one name, ready for the wire. It is immutable.
type Resource struct {
	Name, Version string
	Packed        *anypb.Any
}

// Cache shares resources between streams: each is marshalled once, and lives as long as somebody holds it. The zero
// value is ready; its methods are safe for concurrent use.
type Cache struct {
	mu sync.Mutex // guards made; held while a resource is made, so that it is made once
	// made is keyed by the content's version and not by pointers, which would keep old private keys in memory.
	made map[cacheKey]weak.Pointer[Resource]
}

type cacheKey struct{ name, version string }

// Get returns the resource of this name and version, which build makes where there is none. build sets no name.
func (c *Cache) Get(name, version string, build func() (*tlsv3.Secret, error)) (*Resource, error) {
	key := cacheKey{name, version}
	c.mu.Lock()
	defer c.mu.Unlock()
	if r := c.made[key].Value(); r != nil {
		return r, nil
	}
	made, err := build()
	if err != nil {
		return nil, err
	}
	made.Name = name
	packed, err := anypb.New(made)
	if err != nil {
		return nil, err
	}
	r := &Resource{name, version, packed}
	if c.made == nil {
		c.made = make(map[cacheKey]weak.Pointer[Resource])
	}
	c.made[key] = weak.Make(r)
	runtime.AddCleanup(r, c.forget, key)
	return r, nil
}

func (c *Cache) forget(key cacheKey) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.made[key].Value() == nil {
		delete(c.made, key)
	}
}

// Version names content by its hash, so that a version survives a restart of the agent and a proxy that comes
// back is not sent what it has. The layout number changes when the same inputs are rendered differently. Private keys
// are left out: the certificate stands for its key, and versions are logged.
func Version(what string, parts ...[]byte) string {
	const layout = "1:"
	h := sha256.New()
	io.WriteString(h, layout+what)
	for _, p := range parts {
		var n [8]byte
		binary.BigEndian.PutUint64(n[:], uint64(len(p)))
		h.Write(n[:])
		h.Write(p)
	}
	return hex.EncodeToString(h.Sum(nil)[:16])
}

// VersionOf names a set of resources by their names and versions.
func VersionOf(rs []*Resource) string {
	if len(rs) == 1 {
		return rs[0].Version
	}
	h := sha256.New()
	for _, r := range rs {
		fmt.Fprintf(h, "%q %s\n", r.Name, r.Version)
	}
	return hex.EncodeToString(h.Sum(nil)[:16])
}
