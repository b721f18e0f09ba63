package server

import (
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/ca/files"
	"github.com/chancery-project/chancery/ca/replica"
	"github.com/chancery-project/chancery/ca/store"
	"github.com/chancery-project/chancery/cmd/chancery/process"
	"github.com/chancery-project/chancery/cmd/chancery/server/admission"
	"github.com/chancery-project/chancery/cmd/chancery/server/clusters"
	"github.com/chancery-project/chancery/cmd/chancery/server/connections"
	"github.com/chancery-project/chancery/cmd/chancery/server/federating"
	"github.com/chancery-project/chancery/cmd/chancery/server/keystore"
	"github.com/chancery-project/chancery/cmd/chancery/server/lifetimes"
	"github.com/chancery-project/chancery/cmd/chancery/server/names"
	"github.com/chancery-project/chancery/cmd/chancery/server/naming"
	"github.com/chancery-project/chancery/cmd/chancery/server/parents"
	"github.com/chancery-project/chancery/cmd/chancery/server/publishing"
	"github.com/chancery-project/chancery/cmd/chancery/server/rotating"
	"github.com/chancery-project/chancery/cmd/chancery/server/signing"
	"github.com/chancery-project/chancery/cmd/chancery/server/stores"
	queue "github.com/chancery-project/chancery/csr/admission"
	"github.com/chancery-project/chancery/csr/issuers"
	"github.com/chancery-project/chancery/trust"
)

// Settings are a config file that was read and checked: defaults are set, paths absolute, values parsed.
type Settings struct {
	Config
	file        string
	domain      trust.Domain   // names the line in the authority document once that is known; see InLine
	aliases     []trust.Domain // of identities that count as ours
	profile     *ca.Profile
	keys        *keystore.Place
	lifetimes   *lifetimes.Lifetimes
	rotation    rotating.Times
	parent      *parents.Place // nil without one
	grants      map[trust.ID]issuers.Grant
	admission   queue.Config
	connections connections.Times
	dns         []string // with ips, what the server's certificate names
	ips         []netip.Addr
	clusters    *clusters.Clusters
	naming      *naming.Place // nil without
	place       *stores.Place // where the state lies
	federation  *federating.Place
	signing     *signing.Plan
	publishing  *publishing.Plan
}

// Load reads a config file.
func Load(file string) (*Settings, error) {
	data, err := process.ReadConfig(file)
	if err != nil {
		return nil, err
	}
	return parseConfig(data, file)
}

// parseConfig reads a config as if it lay in the file.
func parseConfig(data []byte, file string) (*Settings, error) {
	s := &Settings{file: file}
	if err := process.DecodeConfig(data, &s.Config); err != nil {
		return nil, s.wrong(err)
	}
	if err := s.setDefaults(file); err != nil {
		return nil, s.wrong(err)
	}
	for _, check := range []func() error{s.parse, s.parseState, s.checkPresent, s.checkFiles, s.parseNames} {
		if err := check(); err != nil {
			return nil, s.wrong(err)
		}
	}
	return s, nil
}

// wrong names the file of what is wrong in it.
func (s *Settings) wrong(err error) error { return fmt.Errorf("config %s: %w", s.file, err) }

// explainStore says what to do about a state that cannot be opened.
func (s *Settings) explainStore(err error) error {
	if seen := replica.CheckUnseen(s.place.Mark(), s.domain, s.State.SealingKey); seen != nil && errors.Is(err, store.ErrMissing) {
		return fmt.Errorf("%w: %w", err, seen)
	}
	return s.place.Explain(err, s.file)
}

// InLine goes by the line of trust domains that a document has, whichever of its names the config gives: what is noted and authenticated by a
// trust domain's name is by that of the line.
func (s *Settings) InLine(doc *authority.Document) {
	if doc != nil {
		s.domain, _ = doc.Line(s.domain)
	}
}

// rootsFile is where `authority init` writes the roots, for agents: beside the state.
func (s *Settings) rootsFile() string { return s.place.Beside("roots.pem") }

// AdminSocket is where the server answers admins. It lies beside the state (decision D14).
func (s *Settings) AdminSocket() string { return s.place.AdminSocket() }

// Place is where the state lies.
func (s *Settings) Place() *stores.Place { return s.place }

func (s *Settings) parse() (err error) {
	if s.domain, err = trust.ParseDomain(s.TrustDomain); err != nil {
		return fmt.Errorf("trustDomain: %w", err)
	}
	if s.aliases, err = names.ParseAliases(s.TrustDomainAliases, s.domain); err != nil {
		return err
	}
	if s.profile, err = ca.NewProfile("workload", s.Profile); err != nil {
		return err // it names the profile
	}
	if s.keys, err = keystore.Parse(s.Keys); err != nil {
		return err
	}
	if s.lifetimes, err = lifetimes.Parse(s.Lifetimes, s.profile.DefaultTTL()); err != nil {
		return err
	}
	if s.federation, err = federating.Parse(s.Federation, s.BundleEndpoint, s.domain, s.aliases); err != nil {
		return err
	}
	if s.rotation, err = rotating.Parse(s.Rotation.AtLeast(s.federation.Readers()), s.profile.MaxTTL(), s.lifetimes.Root, s.Issuer != nil || s.Parent != nil); err != nil {
		return err
	}
	if s.admission, err = admission.Parse(s.Admission); err != nil {
		return err
	}
	if s.connections, err = connections.Parse(s.Connections); err != nil {
		return err
	}
	if s.clusters, err = clusters.Parse(s.Clusters); err != nil {
		return err
	}
	if s.naming, err = naming.Parse(s.Naming, s.domain, s.Clusters); err != nil {
		return err
	}
	if s.signing, err = signing.Parse(s.Signing, s.profile, s.clusters); err != nil {
		return err
	}
	if s.publishing, err = publishing.Parse(s.Publishing, s.domain, s.clusters); err != nil {
		return err
	}
	if s.parent, err = parents.Parse(s.Parent); err != nil {
		return err
	}
	if s.grants, err = parents.ParseServers(s.Issuers, s.domain); err != nil {
		return err
	}
	if err := process.CheckAddress("listen", s.Listen); err != nil {
		return err
	}
	return process.CheckAddress("metrics", s.Metrics)
}

// parseState comes after the keys: not all of them go with every store.
func (s *Settings) parseState() (err error) {
	if s.place, err = stores.Parse(s.State); err != nil {
		return err
	}
	if s.place.Shared() && s.keys.Local() {
		return fmt.Errorf("keys.dir and state.%s are both set; the other servers on a shared store could not use keys that lie in a folder of this one (decision D12): "+
			"leave keys out, which seals them into the state, or name a token, a cloud or Secrets that all servers reach", s.place.Kind())
	}
	return nil
}

func (s *Settings) checkPresent() error {
	switch {
	case s.AuditLog == "":
		return errors.New("auditLog is missing; name a file, such as audit.jsonl")
	case len(s.Clusters) == 0:
		return errors.New("clusters is empty, so nobody could ask for a certificate; it should list whose tokens are accepted")
	case s.Issuer != nil && s.Issuer.CACerts != "" && s.Issuer.TLS != "":
		return errors.New("issuer: cacerts and tls are both set; set the one whose layout the folder has")
	case s.Issuer != nil && s.Issuer.CACerts == "" && s.Issuer.TLS == "":
		return errors.New("issuer: set cacerts or tls to a folder, or leave issuer out")
	case s.Parent != nil && s.Lifetimes != (lifetimes.Config{}):
		return errors.New("parent and lifetimes are both set; the root is the parent's, and the issuer's lifetime is parent.lifetime, so leave lifetimes out")
	case s.Issuer != nil && s.Parent != nil:
		return errors.New("issuer and parent are both set; set issuer for a key that somebody else renews in files, parent for one that this server makes")
	case s.Issuer != nil && s.Lifetimes != (lifetimes.Config{}):
		return errors.New("issuer and lifetimes are both set; a plugged-in issuer brings its own lifetimes along, so leave lifetimes out")
	case s.Issuer != nil && s.Keys != (keystore.Config{}):
		return errors.New("issuer and keys are both set; a plugged-in issuer brings its key along, so leave keys out")
	}
	return nil
}

// checkFiles refuses one file for two things.
func (s *Settings) checkFiles() error {
	written := []process.File{
		{Field: "state.sqlite", Path: s.State.SQLite}, {Field: "state.sealingKey", Path: s.State.SealingKey}, {Field: "auditLog", Path: s.AuditLog},
		{Field: "the mark of the state", Path: s.place.Mark()},
		{Field: "issuanceLog", Path: s.IssuanceLog}, {Field: "addrFile", Path: s.AddrFile}, {Field: "keys.dir", Path: s.Keys.Dir},
		{Field: "the roots for agents", Path: s.rootsFile()}, {Field: "the admin socket", Path: s.AdminSocket()},
	}
	file, err := filepath.Abs(s.file)
	if err != nil {
		return err
	}
	read := []process.File{{Field: "this config", Path: file}, {Field: "keys.passphraseFile", Path: s.Keys.PassphraseFile}}
	if i := s.Issuer; i != nil {
		read = append(read, process.File{Field: "issuer.cacerts", Path: i.CACerts}, process.File{Field: "issuer.tls", Path: i.TLS})
	}
	if p := s.State.Postgres; p != nil {
		read = append(read, process.File{Field: "state.postgres.passwordFile", Path: p.PasswordFile})
	}
	if k := s.State.Kubernetes; k != nil {
		read = append(read, process.File{Field: "state.kubernetes.kubeconfig", Path: k.Kubeconfig})
	}
	for i, c := range s.Clusters {
		read = append(read, process.File{Field: fmt.Sprintf("clusters[%d].jwksFile", i), Path: c.JWKSFile},
			process.File{Field: fmt.Sprintf("clusters[%d].kubeconfig", i), Path: c.Kubeconfig})
	}
	read = append(read, s.federation.Files()...)
	for _, path := range s.Parent.Paths() {
		read = append(read, process.File{Field: "a file of parent", Path: *path})
	}
	return process.CheckDistinct(written, read)
}

// parseNames splits the server's names into DNS names and IPs.
func (s *Settings) parseNames() (err error) {
	s.dns, s.ips, err = names.Parse(s.ServerNames, s.Listen)
	return err
}

func (c *IssuerConfig) plugged() *authority.Plugged {
	switch {
	case c == nil:
		return nil
	case c.CACerts != "":
		return &authority.Plugged{Dir: c.CACerts, Layout: files.CACerts}
	}
	return &authority.Plugged{Dir: c.TLS, Layout: files.TLS}
}
