package csr_test

import (
	"net"
	"testing"

	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	istio "istio.io/api/security/v1alpha1"
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
