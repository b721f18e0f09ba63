package agent

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/chancery-project/chancery/cmd/chancery/process"
	"github.com/chancery-project/chancery/trust"
)

// DefaultSocket is where agents serve.
const DefaultSocket = "/run/chancery/agent.sock"

const maxServers = 16 // named in a config

// Ends of the names of the files beside Bundle.
const (
	endFederation = ".federation"
	endNaming     = ".naming"
)

// Config is the file of `chancery agent -c FILE`. Relative paths count from the file's folder.
type Config struct {
	// Server is the gRPC address of the server, host:port. If the name has several addresses, each is a server. Required,
	// unless Servers is set.
	Server string `json:"server,omitempty"`
	// Servers lists the gRPC addresses of several servers with one state, host:port each, at most 16, instead of Server. Each
	// call and each stream goes to one of them, drawn at random, and to the next one if that fails.
	Servers []string `json:"servers,omitempty"`
	// ServerRoots is a PEM file with the roots that vouch for the server, such as the roots.pem of `authority init`. It is
	// read again for each connection. Required. Who can write it can pose as the server.
	ServerRoots string `json:"serverRoots"`
	// TrustDomain of server and identity. Default: that of Identity, from which it may not differ. After a migration it may be any that
	// the authority had, once the agent has pinned the bundle key.
	TrustDomain string `json:"trustDomain,omitempty"`
	// Cluster is sent as clusterid. Default: not sent; the server then must know exactly one.
	Cluster string `json:"cluster,omitempty"`
	// TokenFile is the service-account token, read again for each request. Required. Who can read it can be this workload.
	TokenFile string `json:"tokenFile"`
	// Socket is where SDS and the Workload API are served, a Unix socket. Default /run/chancery/agent.sock. Its folder
	// should belong to the agent's user: who can write there can pose as the agent.
	Socket string `json:"socket,omitempty"`
	// Consumers is the file with the table of those who were handed SVIDs, which rotations go by; mode 0600. Default: socket with
	// .consumers at its end. On a disk that outlives the machine's restart, if the agent should be known again after one. Who can
	// write it can have a rotation go on before this node's proxies are ready for it.
	Consumers string `json:"consumers,omitempty"`
	// Bundle is the file with the newest bundle and the bundle key that was pinned, mode 0600. Default: socket with .bundle at its
	// end. With it an agent that was off while all roots were replaced finds back by itself. Beside it, with .federation and .naming at
	// their ends, lie the bundles of foreign trust domains and the last word on who may serve the services that were asked for. Who can
	// write them can have the agent trust other roots, and other peers.
	Bundle string `json:"bundle,omitempty"`
	// Identity is the SPIFFE ID to fetch and serve, such as spiffe://cluster.local/ns/foo/sa/web. Required.
	Identity string `json:"identity"`
	// AllowUIDs lists the Unix users that are served, besides root and the agent's own. Default none.
	AllowUIDs []uint32 `json:"allowUIDs,omitempty"`
	// SVIDTTL is the lifetime to ask for. Default: the server's. The server moves it to between 5s and its maxTTL.
	SVIDTTL string `json:"svidTTL,omitempty"`
	// Files lists folders whose PEM files are served as file-cert: and file-root: to every allowed user. Default none.
	Files []string `json:"files,omitempty"`
	// Naming lists which identities a service may have, for the SDS name service:NS/NAME, whatever the server says of it. Default none: the
	// server is asked.
	Naming []NamingConfig `json:"naming,omitempty"`
	// Metrics is the HTTP address of /metrics, /healthz and /readyz, host:port. It is not authenticated. Default
	// 127.0.0.1:9444. On a loopback address /readyz also says what is missing, and Go's profiles are served, under /debug/pprof/.
	Metrics string `json:"metrics,omitempty"`
	// AddrFile, if set, is written once the agent listens: a line metrics=HOST:PORT.
	AddrFile string `json:"addrFile,omitempty"`
}

// NamingConfig is one rule of secure naming.
type NamingConfig struct {
	// Service is the service's NAMESPACE/NAME. Required, and once in the list only.
	Service string `json:"service"`
	// Identities are the SPIFFE IDs that may serve it. At least one.
	Identities []string `json:"identities"`
}

// Settings are a config file that was read and checked: defaults are set, paths absolute, values parsed.
type Settings struct {
	Config
	file   string
	id     trust.ID
	ttl    time.Duration         // 0 = the server's default
	naming map[string][]trust.ID // by NAMESPACE/NAME
}

// Load reads a config file.
func Load(file string) (*Settings, error) {
	data, err := process.ReadConfig(file)
	if err != nil {
		return nil, err
	}
	return parseConfig(data, file)
}

func parseConfig(data []byte, file string) (*Settings, error) {
	s := &Settings{file: file}
	if err := process.DecodeConfig(data, &s.Config); err != nil {
		return nil, s.wrong(err)
	}
	process.SetDefault(&s.Socket, DefaultSocket)
	process.SetDefault(&s.Metrics, "127.0.0.1:9444")
	process.SetDefault(&s.Consumers, s.Socket+".consumers")
	process.SetDefault(&s.Bundle, s.Socket+".bundle")
	paths := []*string{&s.ServerRoots, &s.TokenFile, &s.Socket, &s.Consumers, &s.Bundle, &s.AddrFile}
	for i := range s.Files {
		paths = append(paths, &s.Files[i])
	}
	if err := process.Absolute(file, paths...); err != nil {
		return nil, err
	}
	for _, check := range []func() error{s.checkPresent, s.parse, s.parseNaming} {
		if err := check(); err != nil {
			return nil, s.wrong(err)
		}
	}
	return s, nil
}

// Addresses returns where the servers are, host:port each.
func (s *Settings) Addresses() []string {
	if s.Server != "" {
		return []string{s.Server}
	}
	return s.Servers
}

// wrong names the file of what is wrong in it.
func (s *Settings) wrong(err error) error { return fmt.Errorf("config %s: %w", s.file, err) }

func (s *Settings) checkPresent() error {
	if s.Server != "" && len(s.Servers) > 0 {
		return errors.New("server and servers are both set; put all of them into servers")
	}
	if n := len(s.Servers); n > maxServers {
		return fmt.Errorf("servers lists %d; at most %d can be named, or one name that has many addresses", n, maxServers)
	}
	for _, f := range []struct{ name, value, like string }{
		{"server", strings.Join(s.Addresses(), ""), "give the server's host:port"},
		{"serverRoots", s.ServerRoots, "name the roots.pem that `chancery authority init` wrote"},
		{"tokenFile", s.TokenFile, "name the file of the service-account token"},
		{"identity", s.Identity, "give a SPIFFE ID like spiffe://cluster.local/ns/NS/sa/SA"},
	} {
		if f.value == "" {
			return fmt.Errorf("%s is missing; %s", f.name, f.like)
		}
	}
	if err := process.CheckDistinct([]process.File{{Field: "socket", Path: s.Socket}, {Field: "consumers", Path: s.Consumers}, {Field: "bundle", Path: s.Bundle},
		{Field: "bundle with " + endFederation, Path: s.Bundle + endFederation}, {Field: "bundle with " + endNaming, Path: s.Bundle + endNaming}, {Field: "addrFile", Path: s.AddrFile}},
		[]process.File{{Field: "serverRoots", Path: s.ServerRoots}, {Field: "tokenFile", Path: s.TokenFile}}); err != nil {
		return err
	}
	if i := slices.Index(s.Files, ""); i >= 0 {
		return fmt.Errorf("files[%d] is empty; name a folder, such as /etc/certs", i)
	}
	return nil
}

func (s *Settings) parse() (err error) {
	if s.Server != "" {
		if err := process.CheckAddress("server", s.Server); err != nil {
			return err
		}
	}
	for i, addr := range s.Servers {
		if err := process.CheckAddress(fmt.Sprintf("servers[%d]", i), addr); err != nil {
			return err
		}
		if slices.Contains(s.Servers[:i], addr) {
			return fmt.Errorf("servers[%d]: %s occurs twice; name each server once", i, addr)
		}
	}
	if err := process.CheckAddress("metrics", s.Metrics); err != nil {
		return err
	}
	if s.id, err = trust.ParseID(s.Identity); err != nil {
		return fmt.Errorf("identity: %w", err)
	}
	if s.id.Reserved() {
		return fmt.Errorf("identity: %s is one of Chancery's own, which no workload gets; give one like %s/ns/NS/sa/SA", s.id, s.id.Domain().URI())
	}
	if s.TrustDomain != "" {
		domain, err := trust.ParseDomain(s.TrustDomain)
		if err != nil {
			return fmt.Errorf("trustDomain: %w", err)
		}
		if domain != s.id.Domain() {
			return fmt.Errorf("trustDomain is %s, but identity %s is of %s; they should be the same", domain, s.id, s.id.Domain())
		}
	}
	s.ttl, err = process.Duration("svidTTL", s.SVIDTTL)
	return err
}

// parseNaming reads the rules of secure naming.
func (s *Settings) parseNaming() error {
	s.naming = map[string][]trust.ID{}
	for i, n := range s.Naming {
		ns, name, ok := strings.Cut(n.Service, "/")
		if !ok || ns == "" || name == "" || strings.Contains(name, "/") {
			return fmt.Errorf("naming[%d].service: %q should be NAMESPACE/NAME", i, n.Service)
		}
		if _, twice := s.naming[n.Service]; twice {
			return fmt.Errorf("naming[%d].service: %q occurs twice; put all its identities into one list", i, n.Service)
		}
		if len(n.Identities) == 0 {
			return fmt.Errorf("naming[%d].identities is empty, which does not mean anyone; list who may serve %s", i, n.Service)
		}
		for j, text := range n.Identities {
			id, err := trust.ParseID(text)
			if err != nil {
				return fmt.Errorf("naming[%d].identities[%d]: %w", i, j, err)
			}
			s.naming[n.Service] = append(s.naming[n.Service], id)
		}
	}
	return nil
}

// allowed reports whether a Unix user is served.
func (s *Settings) allowed(uid uint32) bool {
	return uid == 0 || int(uid) == os.Getuid() || slices.Contains(s.AllowUIDs, uid)
}
