// Package source owns the files that an agent reads for each call: its token, and the roots of the server. Both are replaced in place
// by others, so nothing of them is kept. It refuses files that are too large, or have nothing in them.
package source

import (
	"context"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/chancery-project/chancery/trust"
)

const maxToken = 16 << 10 // bytes of a token file

// TokenFile returns a token source that reads a file each time, as kubelet replaces projected tokens in place.
func TokenFile(path string) func(context.Context) (string, error) {
	return func(context.Context) (string, error) {
		data, err := readBounded(path, maxToken)
		if err != nil {
			return "", fmt.Errorf("reading token: %w", err)
		}
		token := strings.TrimSpace(string(data))
		if token == "" {
			return "", fmt.Errorf("reading token: %s is empty", path)
		}
		return token, nil
	}
}

// RootsFile returns a source of roots that reads a PEM file each time.
func RootsFile(path string) func() ([]*x509.Certificate, error) {
	return func() ([]*x509.Certificate, error) {
		data, err := readBounded(path, trust.MaxPEMBytes)
		if err != nil {
			return nil, fmt.Errorf("reading server roots: %w", err)
		}
		certs, err := trust.ParseCertificates(data)
		if err != nil {
			return nil, fmt.Errorf("reading server roots %s: %w", path, err)
		}
		return certs, nil
	}
}

func readBounded(path string, most int) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, int64(most)+1))
	if err == nil && len(data) > most {
		err = errors.New(path + " is larger than expected")
	}
	return data, err
}

// Expiry reads a JWT's exp without verifying anything; only the server's verdict counts.
func Expiry(token string) (time.Time, bool) {
	parts := strings.Split(token, ".")
	if len(parts) != 3 {
		return time.Time{}, false
	}
	payload, err := base64.RawURLEncoding.DecodeString(parts[1])
	var claims struct {
		Exp float64 `json:"exp"`
	}
	if err != nil || json.Unmarshal(payload, &claims) != nil || claims.Exp <= 0 {
		return time.Time{}, false
	}
	return time.Unix(int64(claims.Exp), 0), true
}
