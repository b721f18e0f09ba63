// Package cfssl owns the import of cfssl's signing profiles: a config file of cfssl goes in, profiles of package ca come
// out.
//
// It reads the JSON itself. cfssl's own config package takes unknown fields and misspelt usages in silence, which is what
// an import must not do, and would bring Certificate Transparency's libraries into the binary.
//
// It refuses, by name and with the reason, every setting that would make a profile here mean something else than it
// meant there: CA certificates, extensions out of CSRs, fixed dates, usages that are not issued, name filters, remote
// signers, lifetimes above the limit. What it takes gives certificates that hold no more than cfssl's did.
package cfssl

import (
	"bytes"
	"encoding/json/jsontext"
	"encoding/json/v2"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/chancery-project/chancery/ca"
)

// MaxBytes bounds a config file.
const MaxBytes = 1 << 20

// Profile is an imported profile.
type Profile struct {
	Name   string
	Config ca.ProfileConfig
	Notes  []string // what was left out, and why that is safe
}

// file is a config of cfssl, of which only signing concerns us.
type file struct {
	Signing struct {
		Profiles map[string]settings `json:"profiles"`
		Default  settings            `json:"default"`
	} `json:"signing"`
	OCSP     jsontext.Value     `json:"ocsp"`
	AuthKeys map[string]authKey `json:"auth_keys"`
	Remotes  map[string]string  `json:"remotes"`
}

// authKey is not used, but checked: its key is a secret, and is never part of an error.
type authKey struct {
	Type string `json:"type"`
	Key  string `json:"key"`
}

// settings are the fields of a profile, not decoded yet.
type settings map[string]jsontext.Value

// Import reads a config of cfssl and returns the profile of that name ("default" is signing.default, unless a profile
// has that name), or for "" all of signing.profiles, by name. One refused setting refuses everything that was asked for;
// the error lists all of them.
func Import(data []byte, name string) ([]Profile, error) {
	if len(data) > MaxBytes {
		return nil, fmt.Errorf("the file has more than %d bytes", MaxBytes)
	}
	var f file
	if err := decode(data, &f); err != nil {
		return nil, err
	}
	chosen := f.Signing.Profiles
	if name != "" {
		s, ok := chosen[name]
		if !ok && name == "default" && f.Signing.Default != nil {
			s, ok = f.Signing.Default, true
		}
		if !ok {
			return nil, fmt.Errorf("there is no profile %q; there are %s", name, strings.Join(slices.Sorted(maps.Keys(chosen)), ", "))
		}
		chosen = map[string]settings{name: s}
	}
	if len(chosen) == 0 {
		return nil, errors.New("signing.profiles is empty; for signing.default, name the profile default")
	}
	var out []Profile
	var refused []error
	for _, n := range slices.Sorted(maps.Keys(chosen)) {
		p, err := importProfile(n, chosen[n])
		if err != nil {
			refused = append(refused, err)
			continue
		}
		out = append(out, p)
	}
	return out, errors.Join(refused...)
}

// importer collects what one profile becomes.
type importer struct {
	Profile
	errs []error
}

func (i *importer) refuse(field, format string, args ...any) {
	i.errs = append(i.errs, fmt.Errorf("profile %s: %s: %w", i.Name, field, fmt.Errorf(format, args...)))
}

func (i *importer) note(format string, args ...any) {
	i.Notes = append(i.Notes, fmt.Sprintf(format, args...))
}

func importProfile(name string, s settings) (Profile, error) {
	i := &importer{Name: name}
	for _, required := range []string{"usages", "expiry"} {
		if _, ok := s[required]; !ok {
			i.refuse(required, "it is missing, and nothing is assumed in its place")
		}
	}
	for _, field := range slices.Sorted(maps.Keys(s)) {
		read, known := fields[field]
		if !known {
			i.refuse(field, "cfssl knows no such field, and ignores it; is it misspelt?")
			continue
		}
		read(i, field, s[field])
	}
	if len(i.errs) == 0 { // the limits of profiles here
		if _, err := ca.NewProfile(name, i.Config); err != nil {
			i.errs = append(i.errs, err)
		}
	}
	return i.Profile, errors.Join(i.errs...)
}

// A reader takes one field of a profile.
type reader func(i *importer, field string, value jsontext.Value)

// fields holds every field that a profile of cfssl 1.7.1 can have.
var fields = map[string]reader{
	"usages":        readUsages,
	"expiry":        readExpiry,
	"backdate":      readBackdate,
	"ca_constraint": readCAConstraint,
	"auth_remote":   readAuthRemote,
	"CSRWhitelist":  readCSRWhitelist,
	"auth_key":      readAuthKey,
	"prev_auth_key": readAuthKey,

	"lint_error_level":     noteUnlessEmpty("certificates here are always linted, and every finding is an error"),
	"ignored_lints":        refuseUnlessEmpty("no lint can be switched off here"),
	"ignored_lint_sources": refuseUnlessEmpty("no lint can be switched off here"),

	"copy_extensions":             refuseUnlessEmpty("it takes extensions over from the CSR, which here decides nothing but the key"),
	"allowed_extensions":          refuseUnlessEmpty("it takes extensions over from requests, which here decide nothing but the key"),
	"ClientProvidesSerialNumbers": refuseUnlessEmpty("serial numbers here are drawn by the server"),
	"not_before":                  refuseUnlessEmpty("a fixed date gives every certificate the same life, whenever it is made; use backdate"),
	"not_after":                   refuseUnlessEmpty("a fixed date gives every certificate the same end, whenever it is made; use expiry"),
	"name_whitelist":              refuseUnlessEmpty("it is a pattern that need not match the whole name, and does not see IPs; write idPaths in its place"),
	"remote":                      refuseUnlessEmpty("a remote signer is no profile; the file is that of a front end, import the signer's own"),
	"issuer_urls":                 refuseUnlessEmpty("certificates here carry no authority information; leaves come with their chain"),
	"ocsp_url":                    refuseUnlessEmpty("certificates here name no OCSP responder"),
	"ocsp_no_check":               refuseUnlessEmpty("it is for OCSP responders, which are not issued here"),
	"crl_url":                     refuseUnlessEmpty("certificates here name no CRL; verifiers that relied on it would no longer find one"),
	"ct_log_servers":              refuseUnlessEmpty("certificates here go to no Certificate Transparency log"),
	"cert_store":                  refuseUnlessEmpty("certificates here go into the server's own log, not into a cfssl database"),
	"Policies":                    refuseUnlessEmpty("certificates here carry no policies"),
	"policies":                    refuseUnlessEmpty("certificates here carry no policies"),
}

func refuseUnlessEmpty(why string) reader {
	return func(i *importer, field string, value jsontext.Value) {
		if !empty(value) {
			i.refuse(field, "%s", why)
		}
	}
}

func noteUnlessEmpty(why string) reader {
	return func(i *importer, field string, value jsontext.Value) {
		if !empty(value) {
			i.note("%s is left out: %s", field, why)
		}
	}
}

// empty reports whether a field says what its absence says.
func empty(v jsontext.Value) bool {
	compact := v.Clone()
	if compact.Compact() != nil {
		return false
	}
	switch string(compact) {
	case "null", "false", "0", `""`, "[]", "{}", `"0001-01-01T00:00:00Z"`:
		return true
	}
	return false
}

// readUsages takes the usages that certificates here have: digitalSignature, serverAuth and clientAuth, always, and
// keyEncipherment for RSA keys if the profile says so.
func readUsages(i *importer, field string, value jsontext.Value) {
	var list []string
	if err := decode(value, &list); err != nil {
		i.refuse(field, "%w", err)
		return
	}
	has := map[string]bool{}
	for _, u := range list {
		switch u {
		case "signing", "digital signature":
			has["digital signature"] = true
		case "server auth", "client auth":
			has[u] = true
		case "key encipherment":
			i.Config.KeyEncipherment = true
		case "cert sign", "crl sign":
			i.refuse(field, "%q makes a CA; those come from `chancery authority ceremony`, never from a profile", u)
		case "any":
			i.refuse(field, "%q allows every use", u)
		default:
			i.refuse(field, "%q is not issued here; known are signing, key encipherment, server auth, client auth", u)
		}
	}
	for _, u := range []string{"digital signature", "server auth", "client auth"} {
		if !has[u] {
			i.refuse(field, "certificates here always have %q, which this profile does not grant", u)
		}
	}
}

func readExpiry(i *importer, field string, value jsontext.Value) {
	d, ok := readDuration(i, field, value)
	if !ok {
		return
	}
	switch {
	case d > ca.LeafTTLLimit:
		i.refuse(field, "%s is above the limit of %s", d, ca.LeafTTLLimit)
	case d < ca.MinTTL:
		i.refuse(field, "%s is below %s", d, ca.MinTTL)
	}
	i.Config.DefaultTTL, i.Config.MaxTTL = d.String(), d.String()
}

func readBackdate(i *importer, field string, value jsontext.Value) {
	if empty(value) {
		return // cfssl takes 5m then; a profile here takes its own default, which is shorter
	}
	if d, ok := readDuration(i, field, value); ok {
		i.Config.Backdate = d.String()
	}
}

func readDuration(i *importer, field string, value jsontext.Value) (time.Duration, bool) {
	var text string
	if err := decode(value, &text); err != nil {
		i.refuse(field, "%w", err)
		return 0, false
	}
	d, err := time.ParseDuration(text)
	if err != nil || d < 0 {
		i.refuse(field, "%q is not a duration, such as 24h", text)
		return 0, false
	}
	return d, true
}

func readCAConstraint(i *importer, field string, value jsontext.Value) {
	var c struct {
		IsCA           bool `json:"is_ca"`
		MaxPathLen     int  `json:"max_path_len"`
		MaxPathLenZero bool `json:"max_path_len_zero"`
	}
	if err := decode(value, &c); err != nil {
		i.refuse(field, "%w", err)
		return
	}
	if c.IsCA || c.MaxPathLen != 0 || c.MaxPathLenZero {
		i.refuse(field+".is_ca", "it makes CAs; those come from `chancery authority ceremony`, never from a profile")
	}
}

func readAuthRemote(i *importer, field string, value jsontext.Value) {
	var r struct {
		Remote  string `json:"remote"`
		AuthKey string `json:"auth_key"`
	}
	if err := decode(value, &r); err != nil {
		i.refuse(field, "%w", err)
		return
	}
	if r.Remote != "" || r.AuthKey != "" {
		i.refuse(field, "a remote signer is no profile; the file is that of a front end, import the signer's own")
	}
}

func readCSRWhitelist(i *importer, field string, value jsontext.Value) {
	var w *struct {
		Subject, PublicKeyAlgorithm, PublicKey, SignatureAlgorithm bool
		DNSNames, IPAddresses, EmailAddresses, URIs                bool
	}
	if err := decode(value, &w); err != nil {
		i.refuse(field, "%w", err)
		return
	}
	if w != nil && !w.PublicKey {
		i.refuse(field, "it does not allow the CSR's public key, and nothing else is ever taken from a CSR here")
		return
	}
	if w != nil {
		i.note("%s is left out: nothing but the public key is ever taken from a CSR", field)
	}
}

func readAuthKey(i *importer, field string, value jsontext.Value) {
	var name string
	if err := decode(value, &name); err != nil {
		i.refuse(field, "%w", err)
		return
	}
	if name != "" {
		i.note("%s is left out: who asks proves itself with a token or a certificate", field)
	}
}

// decode reads JSON strictly. Errors say where, and never what: the file holds secrets.
func decode(data []byte, into any) error {
	err := json.Unmarshal(bytes.TrimSpace(data), into, json.RejectUnknownMembers(true))
	if err == nil {
		return nil
	}
	if e, ok := errors.AsType[*json.SemanticError](err); ok {
		if errors.Is(e, json.ErrUnknownName) {
			return fmt.Errorf("there is no field %s", e.JSONPointer)
		}
		return fmt.Errorf("%s should not be of JSON type %s", where(e.JSONPointer), e.JSONKind)
	}
	if e, ok := errors.AsType[*jsontext.SyntacticError](err); ok {
		if errors.Is(e, jsontext.ErrDuplicateName) {
			return fmt.Errorf("%s occurs twice", where(e.JSONPointer))
		}
		return fmt.Errorf("it is not JSON (at byte %d)", e.ByteOffset)
	}
	return errors.New("it is not JSON")
}

func where(p jsontext.Pointer) string {
	if p == "" {
		return "it"
	}
	return string(p)
}
