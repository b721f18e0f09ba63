package naming

import (
	"fmt"
	"strings"
)

// CheckService checks the name of a service: a namespace, a slash, and the service's name there, which for one outside of Kubernetes
// is its host, such as "payments/api.example.com" or "payments/*.example.com".
func CheckService(s string) error {
	ns, name, ok := strings.Cut(s, "/")
	if !ok {
		return fmt.Errorf("service %.80q should be NAMESPACE/NAME, like shop/cart", s)
	}
	if !isLabel(ns) {
		return fmt.Errorf("service %.80q: the namespace should be of 1 to 63 of a-z, 0-9 and '-', neither first nor last '-'", s)
	}
	host := strings.TrimPrefix(name, "*.")
	if len(name) > 253 || host == "" {
		return fmt.Errorf("service %.80q: the name has %d bytes; it should have 1 to 253", s, len(name))
	}
	for label := range strings.SplitSeq(host, ".") {
		if !isLabel(label) {
			return fmt.Errorf("service %.80q: the name should be a DNS name in lower case, like cart, api.example.com or *.example.com", s)
		}
	}
	return nil
}

// isLabel takes '_' as well, which hosts of ServiceEntries have.
func isLabel(s string) bool {
	if s == "" || len(s) > 63 || s[0] == '-' || s[len(s)-1] == '-' {
		return false
	}
	for i := 0; i < len(s); i++ {
		if c := s[i]; (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' && c != '_' {
			return false
		}
	}
	return true
}
