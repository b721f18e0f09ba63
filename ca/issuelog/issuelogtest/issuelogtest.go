// Package issuelogtest owns made-up entries for tests and benchmarks of the issuance log: intents and certificates that fit
// each other as those of a server do, without the price of real signatures.
//
// It refuses to be used outside tests: its certificates are signed by nobody.
package issuelogtest

import (
	"crypto/sha256"
	"encoding/asn1"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math/big"
	"time"

	"github.com/chancery-project/chancery/ca/audit"
)

// Start is the time of the first pair; each later one is a second after.
var Start = time.Date(2026, 11, 30, 8, 0, 0, 0, time.UTC)

// Serial returns the serial of a pair, as hex.
func Serial(i int) string { return hex.EncodeToString(serial(i)) }

func serial(i int) []byte {
	sum := sha256.Sum256(binary.BigEndian.AppendUint64(nil, uint64(i)))
	return append([]byte{1, 2, 3, 4}, sum[:16]...)
}

// Pair returns an intent and the certificate that follows it.
func Pair(i int) (intent, issued audit.Record) {
	type tbs struct {
		Version int `asn1:"explicit,tag:0"`
		Serial  *big.Int
		Name    asn1.RawValue
		Filling []byte
	}
	id := ID(i)
	body := must(asn1.Marshal(tbs{2, new(big.Int).SetBytes(serial(i)), asn1.RawValue{Class: asn1.ClassContextSpecific, Tag: 6, Bytes: []byte(id)}, make([]byte, 360)}))
	cert := must(asn1.Marshal(struct {
		TBS       asn1.RawValue
		Algorithm struct{ ID asn1.ObjectIdentifier }
		Signature asn1.BitString
	}{TBS: asn1.RawValue{FullBytes: body}, Algorithm: struct{ ID asn1.ObjectIdentifier }{asn1.ObjectIdentifier{1, 2, 3}},
		Signature: asn1.BitString{Bytes: make([]byte, 70), BitLength: 560}}))
	tbsSum, certSum := sha256.Sum256(body), sha256.Sum256(cert)
	at := Start.Add(time.Duration(i) * time.Second)
	end := at.Add(time.Hour)
	intent = audit.Record{
		Time: at, Event: audit.Intent, Serial: Serial(i), SPIFFEID: id, Profile: "workload", Issuer: "0102030405060708090a0b0c0d0e0f1011121314",
		NotAfter: &end, KeyType: "p256", TBSHash: hex.EncodeToString(tbsSum[:]),
		Requester: audit.Requester{
			Remote: "127.0.0.1:40000", Method: "token", SPIFFEID: id, Cluster: "Kubernetes", Namespace: "foo", ServiceAccount: "web",
			Pod: "web-1", PodUID: "8a1c3b7e-3a55-4b7e-9d6e-0d3f5a1b2c3d", Node: "node-a", CredentialID: "JTI=5f1d2c3b-aaaa-bbbb-cccc-0123456789ab",
		},
	}
	issued = audit.Record{Time: at, Event: audit.Issued, Serial: intent.Serial, SPIFFEID: id, CertHash: hex.EncodeToString(certSum[:]), Certificate: cert}
	return intent, issued
}

// ID returns the SPIFFE ID of a pair; there are 100.
func ID(i int) string { return fmt.Sprintf("spiffe://cluster.local/ns/foo/sa/web-%02d", i%100) }

// Pairs returns the records of pairs from first on, in order.
func Pairs(first, n int) []audit.Record {
	var all []audit.Record
	for i := range n {
		intent, issued := Pair(first + i)
		all = append(all, intent, issued)
	}
	return all
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}
