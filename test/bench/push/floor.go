package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/binary"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/chancery-project/chancery/api/chanceryv1"
)

const (
	floorArgument = "floor" // the program's first argument in its role as the floor
	floorDone     = "done"  // the file that has the last version that all have acknowledged
	floorPush     = syscall.SIGUSR1
	floorCollect  = syscall.SIGUSR2
	floorBytes    = 2400 // of CRLs and roots in an update, as Chancery's has
)

// floor is the least that a server can do that pushes to all streams and counts who has what: nobody authenticates, nothing is remembered
// but two numbers for each stream. It has the buffers and windows of Chancery's server, which are smaller than gRPC's own.
type floor struct {
	chanceryv1.UnimplementedIssuanceServer
	done string

	mu      sync.Mutex
	version uint64
	changed chan struct{}
	streams map[*uint64]bool // what each has acknowledged
	behind  int
}

func (f *floor) Sync(g grpc.BidiStreamingServer[chanceryv1.SyncRequest, chanceryv1.SyncUpdate]) error {
	mine := new(uint64)
	f.mu.Lock()
	f.streams[mine] = true
	f.behind++
	f.mu.Unlock()
	go func() {
		for {
			m, err := g.Recv()
			if err != nil {
				return
			}
			f.acknowledge(mine, m.GetAcknowledged())
		}
	}()
	for sent := uint64(0); ; {
		f.mu.Lock()
		version, changed := f.version, f.changed
		f.mu.Unlock()
		if sent < version {
			sent = version
			content := make([]byte, floorBytes)
			binary.BigEndian.PutUint64(content, version) // each push brings another
			if err := g.Send(&chanceryv1.SyncUpdate{Version: version, Crls: [][]byte{content}}); err != nil {
				return err
			}
			continue
		}
		select {
		case <-g.Context().Done():
			return nil
		case <-changed:
		}
	}
}

func (f *floor) acknowledge(mine *uint64, version uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if *mine < f.version && version == f.version {
		*mine = version
		if f.behind--; f.behind == 0 {
			_ = os.WriteFile(f.done, fmt.Appendln(nil, version), 0o600) // without it the measurement ends in an error
		}
	}
}

func (f *floor) push() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.version++
	f.behind = len(f.streams)
	close(f.changed)
	f.changed = make(chan struct{})
}

// serveFloor serves until it is killed: the kernel does that when the parent dies.
func serveFloor(dir string) error {
	certificate, root, err := floorCertificate()
	if err != nil {
		return err
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return fmt.Errorf("listening: %w", err)
	}
	f := &floor{done: filepath.Join(dir, floorDone), version: 1, changed: make(chan struct{}), streams: map[*uint64]bool{}}
	server := grpc.NewServer(grpc.Creds(credentials.NewTLS(&tls.Config{Certificates: []tls.Certificate{certificate}, MinVersion: tls.VersionTLS13, DynamicRecordSizingDisabled: true})),
		grpc.ReadBufferSize(1<<10), grpc.WriteBufferSize(4<<10), grpc.StaticStreamWindowSize(64<<10), grpc.StaticConnWindowSize(64<<10))
	chanceryv1.RegisterIssuanceServer(server, f)
	told := make(chan os.Signal, 10)
	signal.Notify(told, floorPush, floorCollect)
	go func() {
		for s := range told {
			if s == floorPush {
				f.push()
			} else {
				runtime.GC()
			}
		}
	}()
	if err := os.WriteFile(filepath.Join(dir, "roots.pem"), root, 0o600); err != nil {
		return fmt.Errorf("writing root: %w", err)
	}
	// Renamed into place, so that the parent never reads half an address.
	path := filepath.Join(dir, "server.addr")
	if err := errors.Join(os.WriteFile(path+".new", []byte("listen="+listener.Addr().String()+"\n"), 0o600), os.Rename(path+".new", path)); err != nil {
		return fmt.Errorf("writing address: %w", err)
	}
	return server.Serve(listener)
}

func floorCertificate() (tls.Certificate, []byte, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, nil, fmt.Errorf("making key: %w", err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "floor"}, NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(24 * time.Hour),
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign, IsCA: true, BasicConstraintsValid: true, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		DNSNames: []string{"localhost"},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return tls.Certificate{}, nil, fmt.Errorf("signing: %w", err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), nil
}
