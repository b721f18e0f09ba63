package e2e

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"time"
)

// testCA is a throw-away certificate authority: for the API server's own TLS, for checks of the harness, and as what an admin
// plugs into Chancery.
type testCA struct {
	cert *x509.Certificate
	key  crypto.Signer
}

// certFiles are the paths of a PEM certificate, its key and the root to trust.
type certFiles struct{ Cert, Key, Root string }

func newTestCA(name string) (*testCA, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("generating the key of %s: %w", name, err)
	}
	return newTestAuthority(name, key, nil)
}

// newTestAuthority makes a CA with a given key, under a parent or, if that is nil, as a root.
func newTestAuthority(name string, key crypto.Signer, parent *testCA) (*testCA, error) {
	ca := &testCA{key: key}
	template := &x509.Certificate{
		SerialNumber:          randomSerial(),
		Subject:               pkix.Name{CommonName: name},
		NotBefore:             time.Now().Add(-time.Minute),
		NotAfter:              time.Now().Add(24 * time.Hour),
		IsCA:                  true,
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
	}
	var err error
	if parent == nil {
		ca.cert, err = sign(template, template, key.Public(), key)
	} else {
		ca.cert, err = sign(template, parent.cert, key.Public(), parent.key)
	}
	return ca, err
}

// issue writes NAME.pem, NAME.key and NAME-root.pem into dir: a certificate for both TLS sides, valid for a day. Names are URIs
// where they hold "://", IP addresses where they parse as such, and else DNS names.
func (ca *testCA) issue(dir, name string, subject pkix.Name, sans ...string) (certFiles, error) {
	return ca.issueFor(dir, name, nil, subject, sans...)
}

// issueFor is issue for a given key; nil makes a P-256 key.
func (ca *testCA) issueFor(dir, name string, key crypto.Signer, subject pkix.Name, sans ...string) (certFiles, error) {
	files := certFiles{
		Cert: filepath.Join(dir, name+".pem"),
		Key:  filepath.Join(dir, name+".key"),
		Root: filepath.Join(dir, name+"-root.pem"),
	}
	template := &x509.Certificate{
		SerialNumber: randomSerial(),
		Subject:      subject,
		NotBefore:    time.Now().Add(-time.Minute),
		NotAfter:     time.Now().Add(24 * time.Hour),
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	for _, san := range sans {
		if u, err := url.Parse(san); err == nil && u.Scheme != "" && u.Host != "" {
			template.URIs = append(template.URIs, u)
		} else if ip := net.ParseIP(san); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		} else {
			template.DNSNames = append(template.DNSNames, san)
		}
	}
	if key == nil {
		made, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			return files, fmt.Errorf("generating the key of %s: %w", name, err)
		}
		key = made
	}
	cert, err := sign(template, ca.cert, key.Public(), ca.key)
	if err != nil {
		return files, err
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return files, err
	}
	for path, block := range map[string]*pem.Block{
		files.Cert: {Type: "CERTIFICATE", Bytes: cert.Raw},
		files.Key:  {Type: "PRIVATE KEY", Bytes: der},
		files.Root: {Type: "CERTIFICATE", Bytes: ca.cert.Raw},
	} {
		if err := os.WriteFile(path, pem.EncodeToMemory(block), 0o600); err != nil {
			return files, err
		}
	}
	return files, nil
}

func sign(template, parent *x509.Certificate, pub crypto.PublicKey, key crypto.Signer) (*x509.Certificate, error) {
	der, err := x509.CreateCertificate(rand.Reader, template, parent, pub, key)
	if err != nil {
		return nil, fmt.Errorf("signing the certificate of %s: %w", template.Subject, err)
	}
	return x509.ParseCertificate(der)
}

func randomSerial() *big.Int {
	var b [16]byte
	rand.Read(b[:])
	return new(big.Int).SetBytes(b[:])
}

// parseCerts reads all certificates of a PEM text.
func parseCerts(data []byte) ([]*x509.Certificate, error) {
	var certs []*x509.Certificate
	for {
		var block *pem.Block
		if block, data = pem.Decode(data); block == nil {
			break
		}
		if block.Type != "CERTIFICATE" {
			return nil, fmt.Errorf("a PEM block of type %s among certificates", block.Type)
		}
		cert, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, err
		}
		certs = append(certs, cert)
	}
	if len(certs) == 0 {
		return nil, fmt.Errorf("no PEM certificate in %d bytes", len(data))
	}
	return certs, nil
}

// serialOf prints a serial the way Envoy does: lower-case hex without separators, whole bytes.
func serialOf(cert *x509.Certificate) string { return fmt.Sprintf("%x", cert.SerialNumber.Bytes()) }
