package doctor

import (
	"context"
	"crypto/x509"
	"errors"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/chancery-project/chancery/ca/checkup"
	"github.com/chancery-project/chancery/ca/issuelog"
	"github.com/chancery-project/chancery/ca/keys"
	"github.com/chancery-project/chancery/ca/replica"
	"github.com/chancery-project/chancery/cmd/chancery/process"
	"github.com/chancery-project/chancery/cmd/chancery/server"
	"github.com/chancery-project/chancery/cmd/chancery/status"
	"github.com/chancery-project/chancery/trust"
)

// exam is one look at a server.
type exam struct {
	settings *server.Settings
	config   string // its file
	offline  bool
	now      time.Time

	state    *checkup.State // nil if nothing is known
	findings []checkup.Finding
	checked  []string
}

// examineServer goes through all checks. None stops another.
func examineServer(ctx context.Context, s *server.Settings, config string, offline bool) *status.Report {
	return examineServerAt(ctx, s, config, offline, time.Now())
}

func examineServerAt(ctx context.Context, s *server.Settings, config string, offline bool, now time.Time) *status.Report {
	e := &exam{settings: s, config: config, offline: offline, now: now}
	for _, check := range []struct {
		name string
		run  func(context.Context)
	}{
		{"server", e.askServer},
		{"state", e.readState},
		{"chain, keys, logs and clusters", e.judge},
		{"trust domain", e.checkDomain},
		{"mark of the state", e.checkMark},
		{"issuer files", e.checkPlugged},
		{"roots.pem", e.checkRoots},
		{"audit log", e.checkAuditLog},
		{"issuance log", e.checkIssuanceLog},
		{"places of keys", e.checkPlaces},
		{"files", e.checkFiles},
		{"disks", e.checkDisks},
		{"clock", e.checkClock},
	} {
		check.run(ctx)
		e.checked = append(e.checked, check.name)
	}
	r := status.NewReport(e.findings)
	r.CA, r.Checked = e.state, e.checked
	return r
}

func (e *exam) found(id string, s checkup.Severity, subject, problem string, args ...any) {
	e.findings = append(e.findings, checkup.Found(id, s, subject, problem, args...))
}

func (e *exam) unchecked(what string, err error) {
	e.findings = append(e.findings, checkup.Unchecked(what, err))
}

// askServer asks the server, if it runs.
func (e *exam) askServer(ctx context.Context) {
	if e.offline {
		return
	}
	socket := e.settings.AdminSocket()
	state, err := status.Ask(ctx, socket)
	if err == nil {
		e.state = state
	} else if f, ok := status.FindingOf(err, socket); ok {
		e.findings = append(e.findings, f)
	} else {
		e.unchecked("server", err)
	}
}

// judge hands over what is known; without it the checks that it would have made are named.
func (e *exam) judge(context.Context) {
	if e.state == nil {
		e.unchecked("chain and keys", errors.New("neither the server nor the state could be read; see the other findings"))
		return
	}
	e.findings = append(e.findings, checkup.Judge(e.state)...)
}

// checkRoots holds roots.pem to the roots that are trusted.
func (e *exam) checkRoots(context.Context) {
	path := e.settings.RootsFile()
	data, err := readSmall(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		e.found("roots-file.missing", checkup.Warning, path, "does not exist")
		return
	case err != nil:
		e.unchecked(path, err)
		return
	case e.state == nil:
		e.unchecked(path, errors.New("it is not known which roots are trusted"))
		return
	}
	certs, err := trust.ParseCertificates(data)
	if err != nil {
		e.found("roots-file.differs", checkup.Warning, path, "does not hold certificates: %v", err)
		return
	}
	trusted := func(c checkup.Certificate) bool { return c.Kind == checkup.KindRoot && c.State != "tainted" }
	for _, c := range e.state.Certs {
		if trusted(c) && !slices.ContainsFunc(certs, func(x *x509.Certificate) bool { return string(x.Raw) == string(c.DER) }) {
			e.found("roots-file.differs", checkup.Warning, path, "lacks root %s, which is trusted", c.ID)
		}
	}
	for _, x := range certs {
		if !slices.ContainsFunc(e.state.Certs, func(c checkup.Certificate) bool { return trusted(c) && string(x.Raw) == string(c.DER) }) {
			e.found("roots-file.differs", checkup.Warning, path, "holds root %x, which is not trusted here", x.SubjectKeyId)
		}
	}
}

// checkAuditLog looks whether a server could write its log. One that runs has said so itself.
func (e *exam) checkAuditLog(context.Context) {
	if e.running() {
		return
	}
	path := e.settings.AuditLog
	if err := canWrite(path); errors.Is(err, fs.ErrPermission) && e.isStranger() {
		e.unchecked("audit log "+path, err)
	} else if err != nil {
		e.found("audit-log.unusable", checkup.Critical, "audit log "+path, "cannot be written: %v", err)
	}
}

// checkIssuanceLog looks at the log's folder, and holds it to the authority document. A server that runs has done so, and says
// itself how it gets on.
func (e *exam) checkIssuanceLog(context.Context) {
	dir := e.settings.IssuanceLog
	if e.running() {
		return
	}
	if dir == "" {
		if listed, _ := e.listedLog(""); listed != "" {
			e.found("issuance-log.other", checkup.Critical, "issuanceLog", "is not set, and the authority document lists %s", listed)
		}
		return
	}
	subject := "issuance log " + dir
	public, err := issuelog.PublicKey(dir)
	var data []byte
	if err == nil {
		data, err = issuelog.ReadSmall(filepath.Join(dir, issuelog.CheckpointFile))
	}
	var c *issuelog.Checkpoint
	if err == nil {
		c, err = issuelog.ParseCheckpoint(data, public)
	}
	switch {
	case errors.Is(err, fs.ErrPermission):
		e.unchecked(subject, err)
		return
	case errors.Is(err, fs.ErrNotExist) && e.state == nil:
		e.unchecked(subject, errors.New("it does not exist, and it is not known whether the authority document lists it"))
		return
	case errors.Is(err, fs.ErrNotExist) && !e.listed(): // a new server makes it at its first start
		return
	case err != nil:
		e.found("issuance-log.unusable", checkup.Critical, subject, "cannot be opened: %v", err)
		return
	}
	listed, registered := e.listedLog(public)
	switch {
	case e.state == nil:
		e.unchecked(subject, errors.New("it is not known which log the authority document lists"))
		return
	case !registered: // it will be, at its first start
	case listed == "":
		e.found("issuance-log.other", checkup.Critical, subject, "is not listed in the authority document yet: run `chancery authority init` once")
	case listed != public:
		e.found("issuance-log.other", checkup.Critical, subject, "is %s, and the authority document lists %s", public, listed)
	}
	e.state.IssuanceLog = &checkup.IssuanceLog{Dir: dir, Size: c.Size, Covered: c.Size, Checkpoint: changed(filepath.Join(dir, issuelog.CheckpointFile))}
}

// listed reports whether the document lists this server, whatever its log.
func (e *exam) listed() bool {
	_, registered := e.listedLog("")
	return registered
}

// listedLog returns the key of the log that the document lists for this server, whose log has a public key, and whether it lists this
// server at all.
func (e *exam) listedLog(public string) (key string, registered bool) {
	if e.state == nil || e.state.Document == nil {
		return "", false
	}
	for _, mine := range []func(checkup.Log) bool{
		func(l checkup.Log) bool { return public != "" && l.Key == public },
		func(l checkup.Log) bool { return l.Replica == e.settings.Place().Replica() && !l.Dead },
		func(l checkup.Log) bool { return l.Replica == "" && !l.Dead },
	} {
		if i := slices.IndexFunc(e.state.Document.Logs, mine); i >= 0 {
			return e.state.Document.Logs[i].Key, true
		}
	}
	return "", false
}

// checkDomain says where the config has another name of the authority than the present one.
func (e *exam) checkDomain(context.Context) {
	named := e.settings.TrustDomain
	if e.state == nil || e.state.TrustDomain == "" || e.state.TrustDomain == named {
		return
	}
	e.found("config.other-domain", checkup.Warning, "config "+e.config, "has trustDomain %s, and the authority is %s now; both names work, so nothing fails", named, e.state.TrustDomain)
}

// checkMark holds the state to the mark of what this server has seen (decision D9).
func (e *exam) checkMark(context.Context) {
	path := e.settings.Place().Mark()
	if e.running() {
		return
	}
	subject := "mark of the state " + path
	if e.state == nil || e.state.Document == nil {
		e.unchecked(subject, errors.New("it is not known which version of the document the state has"))
		return
	}
	sealer, err := keys.LoadSealer(e.settings.State.SealingKey)
	if err != nil {
		e.unchecked(subject, err)
		return
	}
	m, err := replica.ReadMark(path, e.settings.Domain(), sealer)
	_, registered := e.listedLog("")
	switch {
	case errors.Is(err, fs.ErrPermission):
		e.unchecked(subject, err)
	case errors.Is(err, fs.ErrNotExist):
		if registered && e.state.Document.Logs[0].Replica != "" { // else it is from before there were marks
			e.found("mark.unusable", checkup.Critical, subject, "is missing, and the authority document lists this server, %s", e.settings.Place().Replica())
		}
	case err != nil:
		e.found("mark.unusable", checkup.Critical, subject, "cannot be used: %v", err)
	case e.state.Document.Version < m.Version:
		e.found("state.rolled-back", checkup.Critical, e.stateName(), "has version %d of the document, and this server has seen version %d", e.state.Document.Version, m.Version)
	}
}

func (e *exam) running() bool { return e.state != nil && e.state.Running }

// checkPlaces looks whether what protects keys lies with them (decision D9).
func (e *exam) checkPlaces(context.Context) {
	c := e.settings.Config
	if dir := filepath.Dir(c.State.SQLite); c.State.SQLite != "" && within(c.State.SealingKey, dir) {
		e.found("sealing-key.beside-state", checkup.Warning, "sealing key "+c.State.SealingKey, "lies in the folder of the state, %s", dir)
	}
	if c.Keys.Dir != "" && within(c.Keys.PassphraseFile, c.Keys.Dir) {
		e.found("passphrase.beside-keys", checkup.Warning, "passphrase "+c.Keys.PassphraseFile, "lies in the folder of the keys, %s", c.Keys.Dir)
	}
	for _, p := range []struct{ what, path string }{
		{"state", c.State.SQLite}, {"audit log", c.AuditLog}, {"issuance log", c.IssuanceLog}, {"key folder", c.Keys.Dir}, {"mark of the state", e.settings.Place().Mark()},
	} {
		if p.path == "" {
			continue
		}
		if volatile, err := isVolatile(p.path); err != nil {
			e.unchecked("file system of "+p.path, err)
		} else if volatile {
			e.found("place.volatile", checkup.Warning, p.what+" "+p.path, "lies in memory")
		}
	}
}

// within reports whether a file lies in a folder or below it, symbolic links followed as far as they can be.
func within(path, dir string) bool {
	rel, err := filepath.Rel(real(dir), real(path))
	return err == nil && rel != ".." && !strings.HasPrefix(rel, ".."+string(filepath.Separator))
}

func real(path string) string {
	if r, err := filepath.EvalSymlinks(path); err == nil {
		return r
	}
	if r, err := filepath.EvalSymlinks(filepath.Dir(path)); err == nil { // of a file that does not exist
		return filepath.Join(r, filepath.Base(path))
	}
	return path
}

// clockSlack is how far a time may lie ahead of ours, as those of file systems in the network may.
const clockSlack = 5 * time.Minute

// checkClock looks for traces of a clock that was ahead of ours. Certificates that have not begun are judged elsewhere.
func (e *exam) checkClock(context.Context) {
	c := e.settings.Config
	for _, path := range []string{c.State.SQLite, c.State.SQLite + "-wal", e.settings.Place().Mark(), c.AuditLog, filepath.Join(c.IssuanceLog, issuelog.CheckpointFile)} {
		if t := changed(path); t != nil && t.Sub(e.now) > clockSlack {
			e.found("clock.behind", checkup.Warning, "clock", "is at %s, and %s was written at %s", stamp(e.now), path, stamp(*t))
			return
		}
	}
	if e.state != nil && e.state.Document != nil && e.state.Document.Created != nil && e.state.Document.Created.Sub(e.now) > clockSlack {
		e.found("clock.behind", checkup.Warning, "clock", "is at %s, and the authority document was changed at %s", stamp(e.now), stamp(*e.state.Document.Created))
	}
}

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// owner is who should own the files, for messages.
func owner(uid uint32) string { return strings.TrimPrefix(process.UserName(uid), "unix:") }
