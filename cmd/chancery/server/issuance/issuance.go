// Package issuance owns what ties a server to its issuance log: making the log for `authority init`, opening it beside the
// audit log, and the list of logs in the authority document.
//
// It refuses to let a log that the document lists be lost or exchanged without a word.
package issuance

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/chancery-project/chancery/ca/audit"
	"github.com/chancery-project/chancery/ca/authority"
	"github.com/chancery-project/chancery/ca/issuelog"
	"github.com/chancery-project/chancery/ca/replica"
	"github.com/chancery-project/chancery/trust"
)

// Create makes a log for a server with the given log ID, if there is none in the folder yet. No folder gives no log.
func Create(dir string, td trust.Domain, id uint32) (authority.LogState, error) {
	if dir == "" {
		return authority.LogState{}, nil
	}
	_, err := issuelog.Create(dir, fmt.Sprintf("%s/chancery/log/%d", td, id))
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return authority.LogState{}, err
	}
	key, err := issuelog.PublicKey(dir)
	if err != nil {
		return authority.LogState{}, err
	}
	return state(key)
}

func state(key string) (authority.LogState, error) {
	id, err := issuelog.IDOf(key)
	return authority.LogState{ID: id, Key: key}, err
}

// Open opens the log in a folder and mirrors the audit log to it. No folder gives no log.
func Open(dir string, log *audit.Log, logger *slog.Logger) (*issuelog.Log, authority.LogState, error) {
	if dir == "" {
		return nil, authority.LogState{}, nil
	}
	l, err := issuelog.Open(issuelog.Config{Dir: dir, Logger: logger})
	if errors.Is(err, fs.ErrNotExist) {
		err = fmt.Errorf("%w; restore it, or, if it is lost, `chancery replica forget` this server (docs/recovery.md). "+
			"If there has never been one, run `chancery authority init -c FILE` once; if another server has this name, set another state.replica", err)
	}
	if err != nil {
		return nil, authority.LogState{}, err
	}
	log.Mirror(l.Write)
	s, err := state(l.PublicKey())
	return l, s, err
}

// First makes the log of a replica that a document does not list as alive, if there is none in the folder.
func First(dir string, c authority.Config, doc *authority.Document) (made bool, err error) {
	if dir == "" {
		return false, nil
	}
	if _, err := issuelog.PublicKey(dir); !errors.Is(err, fs.ErrNotExist) {
		return false, nil // Open says what is wrong with it
	}
	if own := c.Own(doc); own != nil && own.DeclaredDead == nil {
		return false, nil
	}
	_, err = Create(dir, c.Domain, authority.NewLogID())
	return err == nil, err
}

// Attach makes the log of an authority that was made before its config named one, and lists it in the document.
func Attach(ctx context.Context, dir string, c authority.Config, doc *authority.Document) (made bool, err error) {
	own := c.Own(doc)
	if dir == "" || own == nil || own.Key != "" {
		return false, nil
	}
	if c.IssuanceLog, err = Create(dir, c.Domain, own.ID); err != nil {
		return false, err
	}
	if err := replica.AttachLog(ctx, c.Store, c.Sealer, cmp.Or(c.Replica, "server"), c.IssuanceLog); err != nil {
		return false, fmt.Errorf("making the issuance log of an authority that exists: %w", err)
	}
	return true, nil
}

// Entries is the metric of a log's size.
func Entries(l *issuelog.Log) prometheus.Collector {
	return prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "chancery_ca_issuance_log_entries", Help: "Entries of the issuance log: intents, certificates and failures.",
	}, func() float64 { return float64(l.Size()) })
}
