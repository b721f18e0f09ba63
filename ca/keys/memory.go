package keys

import (
	"context"
	"crypto"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/chancery-project/chancery/ca"
)

// Memory is a Store in the process's memory, for tests: its keys end with the process.
type Memory struct {
	closed atomic.Bool

	mu   sync.Mutex // guards keys
	keys map[string]crypto.Signer
}

// NewMemory returns an empty store.
func NewMemory() *Memory { return &Memory{keys: map[string]crypto.Signer{}} }

// Generate implements Store.
func (m *Memory) Generate(_ context.Context, kt ca.KeyType) (string, error) {
	if err := m.usable(); err != nil {
		return "", err
	}
	key, err := ca.GenerateKey(kt)
	if err != nil {
		return "", fmt.Errorf("making key: %w", err)
	}
	id, err := IDOf(key.Public())
	if err != nil {
		return "", err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.keys["memory:"+id] = key
	return "memory:" + id, nil
}

// Open implements Store.
func (m *Memory) Open(_ context.Context, ref string) (crypto.Signer, error) {
	if err := m.usable(); err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	key, ok := m.keys[ref]
	if !ok {
		return nil, fmt.Errorf("opening key %q: %w", ref, ErrNotFound)
	}
	return signer{key, m.usable}, nil
}

// Delete implements Store.
func (m *Memory) Delete(_ context.Context, ref string) error {
	if err := m.usable(); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.keys, ref)
	return nil
}

// Close forgets all keys.
func (m *Memory) Close() error {
	m.closed.Store(true)
	m.mu.Lock()
	defer m.mu.Unlock()
	clear(m.keys)
	return nil
}

func (m *Memory) usable() error {
	if m.closed.Load() {
		return ErrClosed
	}
	return nil
}
