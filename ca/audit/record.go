package audit

import (
	"encoding/json"
	"strconv"
	"time"
)

// Record is one line. Empty fields are left out.
type Record struct {
	Time  time.Time `json:"time"`
	Event Event     `json:"event"`

	Serial    string     `json:"serial,omitempty"`    // hex; joins intent and result
	SPIFFEID  string     `json:"spiffe_id,omitempty"` // of the certificate
	Profile   string     `json:"profile,omitempty"`
	Issuer    string     `json:"issuer,omitempty"` // hex of the issuing certificate's subject key identifier
	NotAfter  *time.Time `json:"not_after,omitempty"`
	KeyType   string     `json:"key_type,omitempty"`
	TBSHash   string     `json:"tbs_sha256,omitempty"`  // of the to-be-signed bytes, in the intent
	CertHash  string     `json:"cert_sha256,omitempty"` // of the whole certificate, in the result
	Clamped   bool       `json:"clamped,omitempty"`     // the lifetime asked for was cut to the profile's or the chain's
	Requester Requester  `json:"requester,omitzero"`    // who asked

	// Certificate, in a result, is its DER. It is not part of the line: it is for the mirror (see Log.Mirror).
	Certificate []byte `json:"-"`

	Actor  string `json:"actor,omitempty"`  // of an admin command
	Reason string `json:"reason,omitempty"` // stable code of a denial or failure
	Detail string `json:"detail,omitempty"` // free text
}

// Requester says who asked for a certificate, as its credential proved.
type Requester struct {
	Remote         string `json:"remote,omitempty"` // network address
	Method         string `json:"method,omitempty"` // token, mtls, or what the server does by itself
	User           string `json:"user,omitempty"`   // of a command
	SPIFFEID       string `json:"spiffe_id,omitempty"`
	Cluster        string `json:"cluster,omitempty"`
	Namespace      string `json:"namespace,omitempty"`
	ServiceAccount string `json:"service_account,omitempty"`
	Pod            string `json:"pod,omitempty"`
	PodUID         string `json:"pod_uid,omitempty"`
	Node           string `json:"node,omitempty"`
	CredentialID   string `json:"credential_id,omitempty"` // of the token, as in the API server's own audit log
}

// Event says what a record reports.
type Event string

// The events.
const (
	Intent  Event = "intent"  // a certificate is about to be signed; it may exist from here on
	Issued  Event = "issued"  // it was signed
	Failed  Event = "failed"  // signing failed after the intent; no certificate exists
	Denied  Event = "denied"  // a request was refused; nothing was signed
	Admin   Event = "admin"   // an admin did something
	Started Event = "started" // a server began to use this log
)

// AppendJSON writes the record as JSON, the same that encoding/json gives for the tags above (a test holds them together):
// two records a certificate make reflection cost as much as a hash of the certificate.
func (r *Record) AppendJSON(b []byte) []byte {
	b = append(b, `{"time":"`...)
	b = r.Time.AppendFormat(b, time.RFC3339Nano)
	b = append(b, `","event":"`...)
	b = append(append(b, r.Event...), '"')
	b = field(b, "serial", r.Serial)
	b = field(b, "spiffe_id", r.SPIFFEID)
	b = field(b, "profile", r.Profile)
	b = field(b, "issuer", r.Issuer)
	if r.NotAfter != nil {
		b = append(b, `,"not_after":"`...)
		b = append(r.NotAfter.AppendFormat(b, time.RFC3339Nano), '"')
	}
	b = field(b, "key_type", r.KeyType)
	b = field(b, "tbs_sha256", r.TBSHash)
	b = field(b, "cert_sha256", r.CertHash)
	if r.Clamped {
		b = append(b, `,"clamped":true`...)
	}
	if r.Requester != (Requester{}) {
		b = append(b, `,"requester":`...)
		b = append(r.Requester.append(b), '}')
	}
	b = field(b, "actor", r.Actor)
	b = field(b, "reason", r.Reason)
	b = field(b, "detail", r.Detail)
	return append(b, '}')
}

func (r *Requester) append(b []byte) []byte {
	start := len(b)
	b = field(b, "remote", r.Remote)
	b = field(b, "method", r.Method)
	b = field(b, "user", r.User)
	b = field(b, "spiffe_id", r.SPIFFEID)
	b = field(b, "cluster", r.Cluster)
	b = field(b, "namespace", r.Namespace)
	b = field(b, "service_account", r.ServiceAccount)
	b = field(b, "pod", r.Pod)
	b = field(b, "pod_uid", r.PodUID)
	b = field(b, "node", r.Node)
	b = field(b, "credential_id", r.CredentialID)
	b[start] = '{' // in place of the first comma
	return b
}

// field appends a name and a value; an empty value is left out.
func field(b []byte, name, value string) []byte {
	if value == "" {
		return b
	}
	b = append(append(append(b, ',', '"'), name...), '"', ':')
	for i := 0; i < len(value); i++ {
		if c := value[i]; c < 0x20 || c > 0x7e || c == '"' || c == '\\' || c == '<' || c == '>' || c == '&' {
			quoted, err := json.Marshal(value)
			if err != nil { // a string always encodes
				return strconv.AppendQuoteToASCII(b, value)
			}
			return append(b, quoted...)
		}
	}
	return append(append(append(b, '"'), value...), '"')
}
