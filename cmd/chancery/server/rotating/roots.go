package rotating

import (
	"bytes"
	"context"
	"log/slog"
	"os"
	"time"

	"github.com/chancery-project/chancery/trust"
)

// RootsFile keeps the file with the roots for new agents as the authority document has them, while a rotation changes those.
type RootsFile struct {
	Path   string
	Bundle func() (*trust.Bundle, error) // of the document
	Write  func() error                  // writes the file
	Logger *slog.Logger
}

// lookEvery is how soon the file follows: agents that run learn of new roots by Sync.
const lookEvery = time.Second

// Run keeps the file until ctx ends. What cannot be written is said once, and tried again.
func (r RootsFile) Run(ctx context.Context) error {
	ticker := time.NewTicker(lookEvery)
	defer ticker.Stop()
	var written []byte // nil: not known
	told := false
	for {
		b, err := r.Bundle()
		if pem := []byte(nil); err == nil {
			if pem = trust.EncodeCertificates(b.All()...); written == nil || !bytes.Equal(pem, written) {
				if err = r.bring(pem); err == nil {
					written = pem
				}
			}
		}
		if err != nil && !told {
			r.Logger.Warn("the file with the roots for agents is not up to date", "file", r.Path, "reason", err.Error())
		}
		told = err != nil
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

// bring writes the file unless it is as it should be.
func (r RootsFile) bring(pem []byte) error {
	if have, err := os.ReadFile(r.Path); err == nil && bytes.Equal(have, pem) {
		return nil
	}
	if err := r.Write(); err != nil {
		return err
	}
	r.Logger.Info("the file with the roots for agents was written", "file", r.Path)
	return nil
}
