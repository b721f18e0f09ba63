package csr_test

import (
	"fmt"
	"net"
	"testing"

	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/protobuf/proto"
	istio "istio.io/api/security/v1alpha1"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/csr"
)

// BenchmarkIssue measures an issuance without gRPC and TLS around it: token, admission, CSR, lint, audit log, signature,
// answer. Each caller waits for the disk, so there are many.
func BenchmarkIssue(b *testing.B) {
	for _, tc := range []struct {
		name string
		call func(*world) (call, *istio.IstioCertificateRequest)
	}{
		{"token", func(*world) (call, *istio.IstioCertificateRequest) { return bearer(token(claims{})), ask("") }},
		{"refused", func(*world) (call, *istio.IstioCertificateRequest) {
			r := ask("")
			r.Csr = toPEM(newCSR(newKey(), dbURI))
			return bearer(token(claims{})), r
		}},
	} {
		b.Run(tc.name, func(b *testing.B) {
			w := newWorld(b)
			c, r := tc.call(w)
			ctx := peer.NewContext(b.Context(), &peer.Peer{Addr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 1}})
			ctx = metadata.NewIncomingContext(ctx, metadata.Pairs(c.headers...))
			api := w.service
			b.ReportAllocs()
			b.SetParallelism(32)
			b.ResetTimer()
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					if _, err := api.CreateCertificate(ctx, r); (err == nil) != (tc.name == "token") {
						b.Error(err)
					}
				}
			})
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "certs/s")
		})
	}
}

// BenchmarkIssueNative measures what a signed bundle costs an answer of our own API, encoded: it is signed once for all.
func BenchmarkIssueNative(b *testing.B) {
	for _, signed := range []bool{false, true} {
		b.Run(fmt.Sprintf("signed=%v", signed), func(b *testing.B) {
			w := newWorld(b, func(w *world, c *csr.Config) {
				if signed {
					c.Bundles = new(signing).of(w)
				}
			})
			c := bearer(token(claims{}))
			ctx := peer.NewContext(b.Context(), &peer.Peer{Addr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 1}})
			ctx = metadata.NewIncomingContext(ctx, metadata.Pairs(c.headers...))
			api, r := w.service, &chanceryv1.IssueRequest{Requests: []*chanceryv1.CertificateRequest{askNative("")}}
			b.ReportAllocs()
			b.SetParallelism(32)
			b.ResetTimer()
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					resp, err := api.Issue(ctx, r)
					if err != nil {
						b.Error(err)
						return
					}
					if _, err := proto.Marshal(resp); err != nil {
						b.Error(err)
					}
				}
			})
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "certs/s")
		})
	}
}
