package keys

import (
	"bytes"
	"context"
	"crypto"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"

	"filippo.io/age"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/durable"
	"github.com/chancery-project/chancery/trust"
)

// workFactor is that of scrypt, as a power of two: 64 MiB and a fifth of a second for each key, once in a process's
// life. The passphrase should be a long random one, for which any factor would do. Tests lower it.
var workFactor = 16

const (
	maxWorkFactor = 18
	minPassphrase = 16
	maxKeyFile    = 64 << 10
	filesPrefix   = "file:"
)

// FilesConfig says where a Files store lies.
type FilesConfig struct {
	Dir            string // made with mode 0700 by Generate, if it does not exist
	PassphraseFile string // one line of at least 16 bytes, mode 0600
}

// Files is a Store in a folder: each key is a file NAME.age, encrypted with a passphrase in the age format (`age -d`
// opens it) and named by the key's identifier. A key is decrypted once, when it is first opened, and stays in memory.
type Files struct {
	config FilesConfig
	closed atomic.Bool

	mu     sync.Mutex // guards opened, and is held while a file is written or decrypted
	opened map[string]crypto.Signer
}

// OpenFiles checks the passphrase file; the folder may not exist yet.
func OpenFiles(c FilesConfig) (*Files, error) {
	f := &Files{config: c, opened: map[string]crypto.Signer{}}
	if _, err := f.passphrase(); err != nil {
		return nil, err
	}
	return f, nil
}

func (f *Files) passphrase() (string, error) {
	p, err := ReadSecret("passphrase file", f.config.PassphraseFile)
	if err == nil && len(p) < minPassphrase {
		err = fmt.Errorf("passphrase file %s holds %d bytes; at least %d are needed, such as from `head -c 32 /dev/urandom | base64`",
			f.config.PassphraseFile, len(p), minPassphrase)
	}
	return p, err
}

// Generate implements Store.
func (f *Files) Generate(_ context.Context, kt ca.KeyType) (string, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.usable(); err != nil {
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
	sealed, err := f.encrypt(key)
	if err != nil {
		return "", fmt.Errorf("encrypting key %s: %w", id, err)
	}
	if err := f.write(id+".age", sealed); err != nil {
		return "", fmt.Errorf("writing key %s: %w", id, err)
	}
	f.opened[id] = key
	return filesPrefix + id, nil
}

func (f *Files) encrypt(key crypto.Signer) ([]byte, error) {
	pass, err := f.passphrase()
	if err != nil {
		return nil, err
	}
	to, err := age.NewScryptRecipient(pass)
	if err != nil {
		return nil, err
	}
	to.SetWorkFactor(workFactor)
	pem, err := trust.EncodeKey(key)
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	w, err := age.Encrypt(&out, to)
	if err != nil {
		return nil, err
	}
	_, err = w.Write(pem)
	err = errors.Join(err, w.Close())
	return out.Bytes(), err
}

// write puts a file in place whole and durably, or not at all.
func (f *Files) write(name string, data []byte) error {
	if err := durable.MakeDirs(f.config.Dir); err != nil {
		return err
	}
	return durable.Replace(filepath.Join(f.config.Dir, name), data, 0o600)
}

// Open implements Store.
func (f *Files) Open(_ context.Context, ref string) (crypto.Signer, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.usable(); err != nil {
		return nil, err
	}
	id, err := fileID(ref)
	if err != nil {
		return nil, err
	}
	key, ok := f.opened[id]
	if !ok {
		if key, err = f.read(id); err != nil {
			return nil, fmt.Errorf("opening key %s: %w", id, err)
		}
		f.opened[id] = key
	}
	return signer{key, f.usable}, nil
}

func (f *Files) read(id string) (crypto.Signer, error) {
	path := filepath.Join(f.config.Dir, id+".age")
	file, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w: %w", ErrNotFound, err)
	} else if err != nil {
		return nil, err
	}
	defer file.Close()
	pass, err := f.passphrase()
	if err != nil {
		return nil, err
	}
	who, err := age.NewScryptIdentity(pass)
	if err != nil {
		return nil, err
	}
	who.SetMaxWorkFactor(maxWorkFactor)
	plain, err := age.Decrypt(io.LimitReader(file, maxKeyFile), who)
	if err != nil {
		return nil, fmt.Errorf("%s does not open with the passphrase in %s: %w", path, f.config.PassphraseFile, err)
	}
	pem, err := io.ReadAll(plain)
	if err != nil {
		return nil, fmt.Errorf("%s was changed or cut off: %w", path, err)
	}
	key, err := trust.ParseKey(pem)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if have, err := IDOf(key.Public()); err != nil || have != id {
		return nil, fmt.Errorf("%s holds another key, %s", path, have)
	}
	return key, nil
}

// Delete implements Store.
func (f *Files) Delete(_ context.Context, ref string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.usable(); err != nil {
		return err
	}
	id, err := fileID(ref)
	if err != nil {
		return err
	}
	delete(f.opened, id)
	if err := durable.RemoveFile(filepath.Join(f.config.Dir, id+".age")); errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return fmt.Errorf("deleting key %s: %w", id, err)
	}
	return durable.SyncDirectory(f.config.Dir)
}

// fileID returns the identifier in a reference. It is hex, so that no reference leads out of the folder.
func fileID(ref string) (string, error) {
	id, ok := strings.CutPrefix(ref, filesPrefix)
	if !ok || id == "" || len(id) > 64 || strings.Trim(id, "0123456789abcdef") != "" {
		return "", fmt.Errorf("opening key %q: %w: this store's references are %sHEX", ref, ErrNotFound, filesPrefix)
	}
	return id, nil
}

// Close takes every signer of the store out of use.
func (f *Files) Close() error {
	f.closed.Store(true)
	f.mu.Lock()
	defer f.mu.Unlock()
	clear(f.opened)
	return nil
}

func (f *Files) usable() error {
	if f.closed.Load() {
		return ErrClosed
	}
	return nil
}
