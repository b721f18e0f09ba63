// Package checkup owns the judgment on a CA's health: what is known of one (State), what is wrong with it (Finding), and the
// catalogue of all that can be found, with what it means and what to do.
//
// Judge is pure: it reads no clock, file or network, so that a server's word and what was found on disk are judged alike, and
// its thresholds lie in one place. It refuses to count what is not known as well: that is a finding, too.
package checkup

import (
	"crypto/x509"
	"encoding/hex"
	"time"
)

// State is what is known of a CA at a moment. Its JSON is that of `chancery status -o json`; docs/operations.md promises its
// shape.
type State struct {
	Time        time.Time     `json:"time"`
	Running     bool          `json:"running"` // a server said so; else it was read from files
	Started     *time.Time    `json:"started,omitempty"`
	TrustDomain string        `json:"trustDomain"`
	NotReady    string        `json:"notReady,omitempty"` // why nothing can be issued
	WasReady    bool          `json:"wasReady"`           // since the start
	Document    *Document     `json:"document,omitempty"`
	Store       *Store        `json:"store,omitempty"`
	RenewedBy   string        `json:"issuerRenewedBy"` // RenewedByServer, RenewedByImport, RenewedByFiles or RenewedByParent
	MaxTTL      float64       `json:"leafMaxSeconds"`
	Certs       []Certificate `json:"certificates"`
	Keys        []Key         `json:"keys"`
	Requests    *Requests     `json:"requests,omitempty"`
	AuditLog    *AuditLog     `json:"auditLog,omitempty"`
	IssuanceLog *IssuanceLog  `json:"issuanceLog,omitempty"`
	CRLs        *CRLs         `json:"crls,omitempty"`
	Rotation    *Rotation     `json:"rotation,omitempty"` // under way
	Clusters    []Cluster     `json:"clusters"`
	Kubernetes  Kubernetes    `json:"kubernetes,omitzero"`
	// Federation lists foreign trust domains; BundleEndpoint is where others get our roots.
	Federation     []Federated     `json:"federation,omitempty"`
	BundleEndpoint *BundleEndpoint `json:"bundleEndpoint,omitempty"`
}

// Who renews an issuer.
const (
	RenewedByServer = "server"
	RenewedByImport = "import" // an admin: the root's key is kept elsewhere
	RenewedByFiles  = "files"  // whoever puts plugged-in files in place
	RenewedByParent = "parent" // the server, with a parent that signs
)

// Document is the state of the authority document.
type Document struct {
	Version    uint64     `json:"version"`
	Generation uint64     `json:"generation"`
	Logs       []Log      `json:"logs"`
	Requested  *time.Time `json:"issuerRequested,omitempty"`
	Created    *time.Time `json:"-"` // when the newest authority was added
	// BundleKey is the fingerprint of the key that agents pin; empty if there is none.
	BundleKey      string `json:"bundleKey,omitempty"`
	BundleKeyError string `json:"bundleKeyError,omitempty"` // why it signs nothing
}

// Log is a log that the document lists.
type Log struct {
	ID      uint32 `json:"id"`
	Key     string `json:"key,omitempty"`
	Replica string `json:"-"` // whose it is, where the document was read; see Store for a server that runs
	Dead    bool   `json:"-"`
}

// Store is how a server stands to its store, and to others on it.
type Store struct {
	Kind      string     `json:"kind"` // StoreSQLite, or of several servers: StorePostgres, StoreKubernetes
	Place     string     `json:"place"`
	Replica   string     `json:"replica"`
	Confirmed *time.Time `json:"confirmed,omitempty"` // when it last confirmed that the document is the newest
	Error     string     `json:"error,omitempty"`     // why it does not now
	Changed   *time.Time `json:"changed,omitempty"`   // when this server took over, or wrote, the version that it works by
	Driver    string     `json:"driver,omitempty"`    // the replica that renews issuers
	Replicas  []Replica  `json:"replicas"`
	Imported  *time.Time `json:"imported,omitempty"` // when the document was last restored from an export
	By        string     `json:"importedBy,omitempty"`
}

// Kinds of stores.
const (
	StoreSQLite     = "sqlite"
	StorePostgres   = "postgres"
	StoreKubernetes = "kubernetes"
)

// Replica is one of the servers on a store.
type Replica struct {
	Name         string     `json:"name"`
	LogID        uint32     `json:"logId"`
	LogKey       string     `json:"logKey,omitempty"`
	Own          bool       `json:"own"`
	Drives       bool       `json:"drives"`
	Seen         *time.Time `json:"seen,omitempty"` // by its own clock
	Acknowledged uint64     `json:"acknowledged"`   // version of the document; 0: not known
	DeclaredDead *time.Time `json:"declaredDead,omitempty"`
	LogSize      *int64     `json:"logEntries,omitempty"`     // as it told last
	Format       uint32     `json:"documentFormat,omitempty"` // the highest that it reads
	Trouble      string     `json:"trouble,omitempty"`        // why what it tells cannot be used
}

// Kinds of certificates.
const (
	KindRoot         = "root"
	KindIntermediate = "intermediate"
	KindIssuer       = "issuer"
	KindServer       = "server"
)

// Certificate is one of the authorities, or the server's own.
type Certificate struct {
	Kind        string    `json:"kind"`
	ID          string    `json:"id"` // subject key identifier in hex
	State       string    `json:"state"`
	InUse       bool      `json:"inUse"` // part of the chain that signs now
	Subject     string    `json:"subject"`
	NotBefore   time.Time `json:"notBefore"`
	NotAfter    time.Time `json:"notAfter"`
	SecondsLeft int64     `json:"secondsLeft"` // below 0 once it has ended
	ShareLeft   float64   `json:"shareLeft"`   // of its life, 0 to 1
	DER         []byte    `json:"-"`
	// Tainted is since when others may know its key.
	Tainted *time.Time `json:"tainted,omitempty"`
}

// NewCertificate describes a certificate.
func NewCertificate(kind, state string, inUse bool, c *x509.Certificate, now time.Time) Certificate {
	left, life := c.NotAfter.Sub(now), c.NotAfter.Sub(c.NotBefore)
	share := 0.0
	if life > 0 {
		share = min(max(left.Seconds()/life.Seconds(), 0), 1)
	}
	subject := c.Subject.String()
	if len(c.URIs) == 1 {
		subject = c.URIs[0].String()
	}
	return Certificate{
		Kind: kind, ID: hex.EncodeToString(c.SubjectKeyId), State: state, InUse: inUse, Subject: subject, NotBefore: c.NotBefore.UTC(), NotAfter: c.NotAfter.UTC(),
		SecondsLeft: int64(left.Seconds()), ShareLeft: share, DER: c.Raw,
	}
}

// Name is what findings call the certificate.
func (c *Certificate) Name() string {
	if c.Kind == KindServer {
		return "the server's own certificate"
	}
	return c.Kind + " " + c.ID
}

func (c *Certificate) life() time.Duration { return c.NotAfter.Sub(c.NotBefore) }

// Key is an authority's private key.
type Key struct {
	Name        string     `json:"name"`  // "issuer ID" or "root ID"
	Store       string     `json:"store"` // where it lies
	Checked     *time.Time `json:"checked,omitempty"`
	SignSeconds float64    `json:"signSeconds"`
	Waiting     *time.Time `json:"waitingSince,omitempty"` // for a signature
	Error       string     `json:"error,omitempty"`
	Unknown     string     `json:"unknown,omitempty"` // why it was not checked
}

// Requests counts how requests for certificates ended.
type Requests struct {
	Issued  Count            `json:"issued"`
	Refused Count            `json:"refused"`
	Reasons map[string]Count `json:"refusedByReason"`
}

// Count is how often something happened.
type Count struct {
	Minute uint64 `json:"lastMinute"`
	Hour   uint64 `json:"lastHour"`
	Total  uint64 `json:"sinceStart"`
}

// Add counts an outcome: "ok" or the reason of a refusal.
func (r *Requests) Add(outcome string, c Count) {
	if outcome == "ok" {
		r.Issued = c
		return
	}
	r.Refused = Count{r.Refused.Minute + c.Minute, r.Refused.Hour + c.Hour, r.Refused.Total + c.Total}
	r.Reasons[outcome] = c
}

// AuditLog is the state of the audit log.
type AuditLog struct {
	Path  string `json:"path"`
	Bytes int64  `json:"bytes"`
	Error string `json:"error,omitempty"`
	Moved bool   `json:"moved,omitempty"`
}

// IssuanceLog is the state of the issuance log.
type IssuanceLog struct {
	Dir             string     `json:"dir"`
	Size            int64      `json:"entries"`
	Covered         int64      `json:"entriesUnderCheckpoint"`
	Checkpoint      *time.Time `json:"checkpoint,omitempty"`
	Sequenced       *time.Time `json:"sequenced,omitempty"` // when all entries were last under a checkpoint
	Error           string     `json:"error,omitempty"`
	CheckpointError string     `json:"checkpointError,omitempty"`
}

// CRLs is the state of revocations, and of agents as far as it concerns them.
type CRLs struct {
	Off          []string   `json:"off,omitempty"`   // why there are none
	Stale        []string   `json:"stale,omitempty"` // what they lack
	Error        string     `json:"error,omitempty"` // why they are not up to date,
	Failing      *time.Time `json:"failingSince,omitempty"`
	Ends         *time.Time `json:"ends,omitempty"` // the first of them
	Revocations  uint64     `json:"revocations"`
	Certificates uint64     `json:"certificates"` // that are revoked and have not ended
	Agents       uint32     `json:"agents"`
	Acknowledged uint32     `json:"agentsUpToDate"`
	Published    *time.Time `json:"published,omitempty"` // the last roots and CRLs
}

// Cluster is a cluster whose tokens are accepted.
type Cluster struct {
	Name     string `json:"name"`
	NotReady string `json:"notReady,omitempty"`
	WasReady bool   `json:"wasReady"` // once since the start
}
