package federating

import (
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"log/slog"
	"os"
	"sync/atomic"
	"time"

	"github.com/chancery-project/chancery/trust"
)

// readEvery is how often the endpoint's certificate is read again: files that others renew are judged by content, on a ticker.
const readEvery = 10 * time.Second

// keyPair is a certificate with its key in files that others renew. What does not fit together is not used, and the last one stays.
type keyPair struct {
	certificate, key string // files
	logger           *slog.Logger

	current atomic.Pointer[tls.Certificate]
	failed  atomic.Pointer[error] // of the last look; nil if it did not fail
	seen    [2][]byte             // what was read last; of who calls read
}

func (k *keyPair) read() error {
	var data [2][]byte
	for i, path := range []string{k.certificate, k.key} {
		var err error
		if data[i], err = readFile(path); err != nil {
			return err
		}
	}
	if k.current.Load() != nil && bytes.Equal(data[0], k.seen[0]) && bytes.Equal(data[1], k.seen[1]) {
		return nil
	}
	pair, err := tls.X509KeyPair(data[0], data[1]) // its errors hold no key
	if err != nil {
		return fmt.Errorf("certificate %s and key %s: %w", k.certificate, k.key, err)
	}
	// At the start one that has ended is shown, and reported: that nothing can be issued would be worse than that nobody federates.
	if end := pair.Leaf.NotAfter; time.Now().After(end) && k.current.Load() != nil {
		return fmt.Errorf("certificate %s ended at %s", k.certificate, end.UTC().Format(time.RFC3339))
	}
	k.seen = data
	k.current.Store(&pair)
	return nil
}

// run reads the files again and again until ctx ends.
func (k *keyPair) run(ctx context.Context) {
	ticker := time.NewTicker(readEvery)
	defer ticker.Stop()
	was := k.current.Load()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		err := k.read()
		if before := k.err(); err != nil && (before == nil || before.Error() != err.Error()) {
			k.logger.Error("certificate of the bundle endpoint not read again; the last one stays", "reason", err.Error())
		}
		k.failed.Store(nil)
		if err != nil {
			k.failed.Store(&err)
		}
		if now := k.current.Load(); now != was {
			k.logger.Info("bundle endpoint has a new certificate", "not_after", now.Leaf.NotAfter.UTC().Format(time.RFC3339))
			was = now
		}
	}
}

func (k *keyPair) err() error {
	if p := k.failed.Load(); p != nil {
		return *p
	}
	return nil
}

// readFile reads a file that others wrote, bounded.
func readFile(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, trust.MaxPEMBytes+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("reading %s: %w", path, err)
	case len(data) > trust.MaxPEMBytes:
		return nil, fmt.Errorf("%s has more than %d bytes", path, trust.MaxPEMBytes)
	}
	return data, nil
}
