package issuelog

import (
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"

	"github.com/chancery-project/chancery/ca/durable"
	"github.com/chancery-project/chancery/ca/issuelog/tiles"
)

// Files beside the tiles.
const (
	keyFile        = "log.key" // signs checkpoints, mode 0600
	publicFile     = "log.pub" // verifies them
	CheckpointFile = "checkpoint"
	lockFile       = "log.lock"
)

var JournalFiles = [2]string{"journal.0", "journal.1"}

// Create makes an empty log in a folder, with a new key under the given name, which is the log's origin, and returns
// the public key. It is for explicit commands: if there is a log already, fs.ErrExist. A crash on the way leaves what
// a second call completes, under the name of the first.
func Create(dir, name string) (publicKey string, err error) {
	if err := durable.MakeDirs(dir); err != nil {
		return "", fmt.Errorf("making issuance log: %w", err)
	}
	if _, err := os.Lstat(filepath.Join(dir, CheckpointFile)); err == nil {
		return "", fmt.Errorf("making issuance log: %s: %w", dir, fs.ErrExist)
	}
	if entries, err := os.ReadDir(filepath.Join(dir, "tile")); err == nil && len(entries) > 0 {
		return "", fmt.Errorf("making issuance log: %s has tiles and no checkpoint: it was a log; restore its checkpoint", dir)
	}
	d := &disk{dir: dir}
	secret, err := ReadSmall(filepath.Join(dir, keyFile))
	if errors.Is(err, fs.ErrNotExist) {
		var text string
		if text, _, err = note.GenerateKey(rand.Reader, name); err == nil {
			secret = []byte(text + "\n")
			err = d.replace(keyFile, secret)
		}
	}
	if err != nil {
		return "", fmt.Errorf("making issuance log: %w", err)
	}
	signer, public, err := parseSecret(string(secret))
	if err != nil {
		return "", fmt.Errorf("making issuance log: %s: %w", filepath.Join(dir, keyFile), err)
	}
	if err := d.replace(publicFile, []byte(public+"\n")); err != nil {
		return "", err
	}
	_, err = writeCheckpoint(d, signer, new(tiles.Tree))
	return public, err
}

// PublicKey returns the public key of the log in a folder, as its own log.pub says.
func PublicKey(dir string) (string, error) {
	key, err := ReadPublicKey(filepath.Join(dir, publicFile))
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) {
		return "", fmt.Errorf("%s is no folder of an issuance log, as issuanceLog in a server's config names it: %w", dir, err)
	}
	return key, err
}

// ReadPublicKey reads a file with a log's public key.
func ReadPublicKey(path string) (string, error) {
	data, err := ReadSmall(path)
	if err != nil {
		return "", fmt.Errorf("reading log's public key: %w", err)
	}
	key := strings.TrimSuffix(string(data), "\n")
	v, err := note.NewVerifier(key)
	if err == nil {
		name, rest, _ := strings.Cut(key, "+")
		hash, text, _ := strings.Cut(rest, "+")
		if name != v.Name() || hash != fmt.Sprintf("%08x", v.KeyHash()) || !isCanonical(text) {
			err = errors.New("it is not written as logs write theirs")
		}
	}
	if err != nil {
		return "", fmt.Errorf("reading log's public key %s: %w; it should be one line, NAME+HASH+KEY", path, err)
	}
	return key, nil
}

// isCanonical reports whether base64 is as encoders write it; decoders pass over line ends and unused bits.
func isCanonical(text string) bool {
	b, err := base64.StdEncoding.DecodeString(text)
	return err == nil && base64.StdEncoding.EncodeToString(b) == text
}

// parseSecret returns the signer of a secret key, and the public key that belongs to it.
func parseSecret(text string) (note.Signer, string, error) {
	text = strings.TrimSuffix(text, "\n")
	signer, err := note.NewSigner(text)
	if err != nil {
		return nil, "", errors.New("it holds no key of a log")
	}
	parts := strings.SplitN(text, "+", 5) // PRIVATE+KEY+NAME+HASH+KEY
	seed, err := base64.StdEncoding.DecodeString(parts[4])
	if err != nil {
		return nil, "", errors.New("it holds no key of a log")
	}
	public, err := note.NewEd25519VerifierKey(signer.Name(), publicOf(seed[1:]))
	return signer, public, err
}

// ReadSmall reads a file that holds a few lines.
func ReadSmall(path string) ([]byte, error) { return readBounded(path, 64<<10) }

func readBounded(path string, most int) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, int64(most)+1))
	if err == nil && len(data) > most {
		err = fmt.Errorf("%s has more than %d bytes", path, most)
	}
	return data, err
}

// Checkpoint is the signed statement of a log that its first Size entries are those of Root.
type Checkpoint struct {
	Origin string
	Size   int64
	Root   tlog.Hash
	Note   string // as signed
}

func writeCheckpoint(d *disk, signer note.Signer, t *tiles.Tree) ([]byte, error) {
	root := t.Root()
	text := fmt.Sprintf("%s\n%d\n%s\n", signer.Name(), t.Size, base64.StdEncoding.EncodeToString(root[:]))
	signed, err := note.Sign(&note.Note{Text: text}, signer)
	if err != nil {
		return nil, fmt.Errorf("signing checkpoint: %w", err)
	}
	return signed, d.replace(CheckpointFile, signed)
}

// ParseCheckpoint reads a checkpoint and verifies its signature with the log's public key.
func ParseCheckpoint(data []byte, publicKey string) (*Checkpoint, error) {
	v, err := note.NewVerifier(publicKey)
	if err != nil {
		return nil, fmt.Errorf("the log's public key: %w", err)
	}
	n, err := note.Open(data, note.VerifierList(v))
	if err != nil {
		return nil, fmt.Errorf("the checkpoint is not signed by %s: %w", v.Name(), err)
	}
	for _, s := range append(n.Sigs, n.UnverifiedSigs...) { // how it is written is not covered by it
		if !isCanonical(s.Base64) {
			return nil, fmt.Errorf("the checkpoint's signature by %s is not written as logs write it", s.Name)
		}
	}
	lines := strings.Split(n.Text, "\n")
	if len(lines) < 4 || lines[0] != v.Name() {
		return nil, fmt.Errorf("the checkpoint is of %q; it should be of %s", lines[0], v.Name())
	}
	c := &Checkpoint{Origin: lines[0], Note: string(data)}
	if c.Size, err = strconv.ParseInt(lines[1], 10, 64); err != nil || c.Size < 0 || strconv.FormatInt(c.Size, 10) != lines[1] {
		return nil, fmt.Errorf("the checkpoint's size is %q", lines[1])
	}
	root, err := base64.StdEncoding.Strict().DecodeString(lines[2])
	if err != nil || len(root) != tlog.HashSize {
		return nil, fmt.Errorf("the checkpoint's root is %q", lines[2])
	}
	copy(c.Root[:], root)
	return c, nil
}
