//go:build pkcs11 && cgo

package pkcs11

import (
	"context"
	"crypto"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	p11 "github.com/miekg/pkcs11"
	"go.step.sm/crypto/kms/apiv1"
	kms "go.step.sm/crypto/kms/pkcs11"

	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/ca/keys"
)

const (
	rsaBits = 3072
	// reopenPause is how long a failure to open the token stands before it is tried again.
	reopenPause = time.Second
	// closePatience bounds how long Close waits for signatures under way.
	closePatience = 5 * time.Second
)

// token is a Store in one token. Its connection is replaced when it turns out to be lost.
type token struct {
	config Config
	closed atomic.Bool

	mu      sync.Mutex // guards all below; held while the token is opened, not while it signs
	conn    *kms.PKCS11
	epoch   uint64 // counts connections
	failed  error  // why the last attempt to open failed
	retry   time.Time
	refused pinFile // the state of the PIN's file with which the token refused the PIN
	logins  int
}

// pinFile tells one state of the PIN's file from another.
type pinFile struct {
	modified time.Time
	size     int64
}

// Open opens a token. A wrong PIN costs one attempt.
func Open(_ context.Context, c Config) (Store, error) {
	t := &token{config: c}
	if _, _, err := t.connection(); err != nil {
		return nil, err
	}
	return t, nil
}

// connection returns the connection and its epoch, opening one if there is none.
func (t *token) connection() (*kms.PKCS11, uint64, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case t.closed.Load():
		return nil, 0, keys.ErrClosed
	case t.conn != nil:
		return t.conn, t.epoch, nil
	case t.failed != nil && time.Now().Before(t.retry):
		return nil, 0, t.failed
	}
	conn, err := t.open()
	if err != nil {
		t.failed, t.retry = fmt.Errorf("opening token %s: %w", t.config.URI.token(), err), time.Now().Add(reopenPause)
		return nil, 0, t.failed
	}
	if t.epoch > 0 {
		t.config.Logger.Warn("token opened again after its connection was lost", "token", t.config.URI.token())
	}
	t.conn, t.failed, t.epoch = conn, nil, t.epoch+1
	return t.conn, t.epoch, nil
}

// open logs in. Caller holds mu.
func (t *token) open() (*kms.PKCS11, error) {
	pin, err := keys.ReadSecret("PIN file", t.config.URI.pinSource)
	if err != nil {
		return nil, err
	}
	info, err := os.Stat(t.config.URI.pinSource)
	if err != nil {
		return nil, fmt.Errorf("reading PIN file: %w", err)
	}
	state := pinFile{info.ModTime(), info.Size()}
	if t.refused == state {
		return nil, fmt.Errorf("the token has refused the PIN in %s; it is not tried again before that file changes, since tokens lock themselves", t.config.URI.pinSource)
	}
	t.logins++
	conn, err := kms.New(context.Background(), apiv1.Options{URI: t.config.URI.token(), Pin: pin})
	if err == nil {
		t.refused = pinFile{}
		return conn, nil
	}
	if code, ok := errors.AsType[p11.Error](err); ok && isPIN(code) {
		t.refused = state
		return nil, fmt.Errorf("the token refuses the PIN in %s: %w", t.config.URI.pinSource, err)
	}
	return nil, err
}

func isPIN(code p11.Error) bool {
	switch code {
	case p11.CKR_PIN_INCORRECT, p11.CKR_PIN_INVALID, p11.CKR_PIN_LEN_RANGE, p11.CKR_PIN_EXPIRED, p11.CKR_PIN_LOCKED, p11.CKR_USER_PIN_NOT_INITIALIZED:
		return true
	}
	return false
}

// lost reports whether an error means that the connection should be made anew. Of PKCS#11's errors these are all but
// those about what was asked for.
func lost(err error) bool {
	code, ok := errors.AsType[p11.Error](err)
	if !ok {
		return strings.Contains(err.Error(), "closed") // a connection that another caller is replacing
	}
	switch code {
	case p11.CKR_ARGUMENTS_BAD, p11.CKR_DATA_INVALID, p11.CKR_DATA_LEN_RANGE, p11.CKR_MECHANISM_INVALID, p11.CKR_MECHANISM_PARAM_INVALID,
		p11.CKR_KEY_FUNCTION_NOT_PERMITTED, p11.CKR_KEY_TYPE_INCONSISTENT, p11.CKR_KEY_SIZE_RANGE, p11.CKR_TEMPLATE_INCONSISTENT,
		p11.CKR_ATTRIBUTE_VALUE_INVALID, p11.CKR_FUNCTION_NOT_SUPPORTED, p11.CKR_TOKEN_WRITE_PROTECTED:
		return false
	}
	return !isPIN(code)
}

// drop ends a connection that is lost, unless somebody did so before.
func (t *token) drop(epoch uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.conn != nil && t.epoch == epoch {
		// Closed before the next one is opened: only then is the library itself started afresh.
		t.conn.Close()
		t.conn = nil
	}
}

// with calls f with a connection, and once more with a new one if the first turns out to be lost.
func (t *token) with(f func(*kms.PKCS11, uint64) error) error {
	conn, epoch, err := t.connection()
	if err != nil {
		return err
	}
	if err = f(conn, epoch); err == nil || !lost(err) {
		return err
	}
	if t.closed.Load() {
		return keys.ErrClosed
	}
	t.drop(epoch)
	conn, epoch, again := t.connection()
	if again != nil {
		return errors.Join(err, again)
	}
	return f(conn, epoch)
}

// Generate implements keys.Store. The token makes the key and never gives it out (CKA_SENSITIVE, not CKA_EXTRACTABLE).
func (t *token) Generate(_ context.Context, kt ca.KeyType) (string, error) {
	request := &apiv1.CreateKeyRequest{}
	switch kt {
	case ca.P256:
		request.SignatureAlgorithm = apiv1.ECDSAWithSHA256
	case ca.P384:
		request.SignatureAlgorithm = apiv1.ECDSAWithSHA384
	case ca.RSA:
		request.SignatureAlgorithm, request.Bits = apiv1.SHA256WithRSA, rsaBits
	default:
		return "", fmt.Errorf("making key: tokens make keys of type p256, p384 and rsa, not %s", kt)
	}
	var id [16]byte
	rand.Read(id[:])
	request.Name = fmt.Sprintf("pkcs11:id=%x;object=chancery-%x", id, id[:4])
	err := t.with(func(conn *kms.PKCS11, _ uint64) error {
		_, err := conn.CreateKey(request)
		return err
	})
	if err != nil {
		return "", fmt.Errorf("making key in token: %w", err)
	}
	return request.Name, nil
}

var refForm = regexp.MustCompile(`^pkcs11:id=([0-9a-f]{32});object=chancery-([0-9a-f]{8})$`)

func checkRef(ref string) error {
	m := refForm.FindStringSubmatch(ref)
	if m == nil || m[1][:8] != m[2] {
		return fmt.Errorf("key %.100q: %w: this store's references are pkcs11:id=HEX;object=NAME", ref, keys.ErrNotFound)
	}
	return nil
}

// Open implements keys.Store.
func (t *token) Open(_ context.Context, ref string) (crypto.Signer, error) {
	if t.closed.Load() {
		return nil, keys.ErrClosed
	}
	if err := checkRef(ref); err != nil {
		return nil, err
	}
	s := &signer{token: t, ref: ref}
	err := t.with(s.find)
	if err != nil {
		return nil, fmt.Errorf("opening key %s in token: %w", ref, err)
	}
	s.public = s.key.Public()
	return s, nil
}

// Delete implements keys.Store.
func (t *token) Delete(_ context.Context, ref string) error {
	if t.closed.Load() {
		return keys.ErrClosed
	}
	if err := checkRef(ref); err != nil {
		return err
	}
	err := t.with(func(conn *kms.PKCS11, _ uint64) error {
		err := conn.DeleteKey(ref)
		if err != nil && notFound(err) {
			return nil
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("deleting key %s in token: %w", ref, err)
	}
	return nil
}

func notFound(err error) bool {
	return errors.Is(err, apiv1.NotFoundError{}) || strings.Contains(err.Error(), "not found")
}

// Close ends the connection, after signatures under way.
func (t *token) Close() error {
	if t.closed.Swap(true) {
		return nil
	}
	done := make(chan error, 1)
	go func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		if t.conn == nil {
			done <- nil
			return
		}
		done <- t.conn.Close()
	}()
	select {
	case err := <-done:
		return err
	case <-time.After(closePatience):
		return fmt.Errorf("closing token %s: it does not answer", t.config.URI.token())
	}
}
