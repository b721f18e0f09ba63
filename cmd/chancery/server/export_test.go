package server

import (
	"errors"
	"testing"

	"github.com/chancery-project/chancery/ca/backup"
	"github.com/chancery-project/chancery/ca/document"
	"github.com/chancery-project/chancery/ca/store"
)

// TestD9ExportOfAnotherHistory: where the store was rolled back and went on from there, to a higher version than this server has, the
// export is what this server knows, not what it refuses.
func TestD9ExportOfAnotherHistory(t *testing.T) {
	srv, stop := started(t, "")
	defer stop()
	old, version, err := srv.store.Load(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	other, err := document.Decode(old, version, srv.sealer)
	if err != nil {
		t.Fatal(err)
	}
	if err := srv.authority.Change(t.Context(), func(*document.Document) error { return nil }); err != nil {
		t.Fatal(err)
	}
	for { // what a server writes as it starts may come in between
		known := srv.authority.Document().Version
		for other.Version <= known { // the other history
			if other, err = other.Next(old); err == nil {
				other.By = "elsewhere" // else both histories could be the same
				old, err = other.Encode(srv.sealer)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		if err = srv.store.Replace(t.Context(), known, other.Version, old); err == nil {
			break
		} else if !errors.Is(err, store.ErrConflict) {
			t.Fatal(err)
		}
	}
	out, err := srv.exporter().Export(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	e, _, err := backup.Open(out, srv.sealer)
	if err != nil {
		t.Fatal(err)
	}
	if e.Version != srv.authority.Document().Version || e.Source != backup.FromServer {
		t.Errorf("exported version %d from the %s; this server knows version %d", e.Version, e.Source, srv.authority.Document().Version)
	}
}
