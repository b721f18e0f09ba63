package main

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/chancery-project/chancery/api/chanceryv1"
)

// prepare makes a service-account key, writes its JWKS, and returns a token for each agent: node agents of one account, each in a pod of
// its own on a node of its own.
func prepare(dir string, agents int) ([]string, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("making service-account key: %w", err)
	}
	set := jose.JSONWebKeySet{Keys: []jose.JSONWebKey{{Key: &key.PublicKey, KeyID: "k", Algorithm: string(jose.ES256), Use: "sig"}}}
	text, err := json.Marshal(set)
	if err != nil {
		return nil, fmt.Errorf("encoding JWKS: %w", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "jwks.json"), text, 0o600); err != nil {
		return nil, fmt.Errorf("writing JWKS: %w", err)
	}
	signer, err := jose.NewSigner(jose.SigningKey{Algorithm: jose.ES256, Key: jose.JSONWebKey{Key: key, KeyID: "k"}}, nil)
	if err != nil {
		return nil, fmt.Errorf("making token signer: %w", err)
	}
	now := time.Now().Truncate(time.Second)
	tokens := make([]string, agents)
	for i := range tokens {
		claims := map[string]any{
			"iss": "https://kubernetes.default.svc", "sub": "system:serviceaccount:chancery:agent", "aud": []string{"istio-ca"},
			"iat": now.Unix(), "nbf": now.Unix(), "exp": now.Add(time.Hour).Unix(), "jti": fmt.Sprintf("token-%d", i),
			"kubernetes.io": map[string]any{
				"namespace": "chancery", "serviceaccount": map[string]string{"name": "agent", "uid": "account"},
				"node": map[string]string{"name": fmt.Sprintf("node-%d", i), "uid": fmt.Sprintf("node-uid-%d", i)},
				"pod":  map[string]string{"name": fmt.Sprintf("agent-%d", i), "uid": fmt.Sprintf("pod-uid-%d", i)},
			},
		}
		if tokens[i], err = jwt.Signed(signer).Claims(claims).Serialize(); err != nil {
			return nil, fmt.Errorf("signing a token: %w", err)
		}
	}
	return tokens, nil
}

// connecting is how many handshakes are under way at a time: the server computes few at once, and sends others away.
const connecting = 8

// fleet is all agents of one server.
type fleet struct {
	took   time.Duration // until all had the first update
	conns  []*grpc.ClientConn
	cancel context.CancelFunc
	wg     sync.WaitGroup
	size   atomic.Int64 // of the last update

	mu      sync.Mutex
	seen    map[[sha256.Size]byte]int // agents that have answered an update, by its CRLs
	has     [][sha256.Size]byte       // what each answered last
	last    uint64
	at      time.Time // when the last answer was sent
	changed chan struct{}
	failed  int
	first   error
	closing bool
}

// connect opens a connection and a stream for each token, and returns once each has answered the first update.
func connect(ctx context.Context, t *target, tokens []string) (*fleet, error) {
	ctx, cancel := context.WithCancel(ctx)
	f := &fleet{cancel: cancel, seen: map[[sha256.Size]byte]int{}, has: make([][sha256.Size]byte, len(tokens)), changed: make(chan struct{}), conns: make([]*grpc.ClientConn, len(tokens))}
	begun := time.Now()
	next := atomic.Int64{}
	var dialers sync.WaitGroup
	for range connecting {
		dialers.Go(func() {
			for {
				i := int(next.Add(1)) - 1
				if i >= len(tokens) || ctx.Err() != nil {
					return
				}
				if err := f.open(ctx, t, i, tokens[i]); err != nil {
					f.fail(err)
					return
				}
			}
		})
	}
	dialers.Wait()
	if err := f.err(); err != nil {
		return f, err
	}
	f.took = time.Since(begun)
	return f, nil
}

// open connects one agent and has it follow its stream.
func (f *fleet) open(ctx context.Context, t *target, i int, token string) error {
	conn, err := grpc.NewClient(t.addr, grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{RootCAs: t.roots, ServerName: "localhost", MinVersion: tls.VersionTLS13})),
		grpc.WithReadBufferSize(4<<10), grpc.WithWriteBufferSize(4<<10), grpc.WithStaticStreamWindowSize(256<<10), grpc.WithStaticConnWindowSize(256<<10)) // as package csr/client
	if err != nil {
		return fmt.Errorf("connecting: %w", err)
	}
	f.conns[i] = conn
	ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+token, "clusterid", "Kubernetes")
	var s chanceryv1.Issuance_SyncClient
	for try := 0; ; try++ { // the server sends away whom it cannot serve in time
		if s, err = chanceryv1.NewIssuanceClient(conn).Sync(ctx, grpc.WaitForReady(true)); err == nil {
			err = f.answer(s, i)
		}
		if err == nil || try == 20 || ctx.Err() != nil {
			break
		}
		time.Sleep(100 * time.Millisecond)
	}
	if err != nil {
		return fmt.Errorf("agent %d: %w", i, err)
	}
	f.wg.Go(func() {
		for {
			if err := f.answer(s, i); err != nil {
				f.fail(fmt.Errorf("agent %d: %w", i, err))
				return
			}
		}
	})
	return nil
}

// answer takes one update and acknowledges it.
func (f *fleet) answer(s chanceryv1.Issuance_SyncClient, i int) error {
	u, err := s.Recv()
	if err != nil {
		return err
	}
	m := &chanceryv1.SyncRequest{Acknowledged: u.GetVersion(), Consumers: &chanceryv1.ConsumersState{
		Agent: fmt.Appendf(nil, "agent %010d", i), Generation: u.GetBundle().GetGeneration(), Until: timestamppb.New(time.Now().Add(time.Hour)), Consumers: 10,
	}}
	for _, issuer := range u.GetIssuers() {
		m.Consumers.Held = append(m.Consumers.Held, &chanceryv1.HeldIssuer{Issuer: issuer[:min(20, len(issuer))], Until: m.Consumers.GetUntil(), Consumers: 10})
	}
	if err := s.Send(m); err != nil {
		return err
	}
	f.size.Store(int64(proto.Size(u)))
	f.mu.Lock()
	defer f.mu.Unlock()
	content := sha256.Sum256(slices.Concat(u.GetCrls()...)) // not the version: updates that only bring checkpoints have one of their own
	if f.has[i] == content {
		return nil
	}
	f.has[i] = content
	if f.seen[content]++; f.seen[content] == len(f.conns) {
		f.last, f.at = u.GetVersion(), time.Now()
		close(f.changed)
		f.changed = make(chan struct{})
	}
	return nil
}

// wait returns when the last agent answered an update that came after a version and that all have answered.
func (f *fleet) wait(ctx context.Context, after uint64) (time.Time, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for {
		f.mu.Lock()
		changed, last, at, failed := f.changed, f.last, f.at, f.first
		f.mu.Unlock()
		if last > after || failed != nil {
			return at, failed
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return at, errors.New("not all agents have answered within a minute")
		}
	}
}

// version is that of the last update which all have answered.
func (f *fleet) version() uint64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.last
}

func (f *fleet) bytes() int { return int(f.size.Load()) }

func (f *fleet) fail(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closing {
		return
	}
	if f.failed++; f.first == nil {
		f.first = err
		close(f.changed)
		f.changed = make(chan struct{})
	}
}

// err says how many agents failed, if any did, and how the first one failed.
func (f *fleet) err() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.first == nil {
		return nil
	}
	return fmt.Errorf("%d agents failed; the first: %w", f.failed, f.first)
}

func (f *fleet) close() {
	f.mu.Lock()
	f.closing = true
	f.mu.Unlock()
	f.cancel()
	f.wg.Wait()
	for _, c := range f.conns {
		if c != nil {
			c.Close()
		}
	}
}
