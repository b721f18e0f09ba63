// Package names owns the `serverNames` of a server's config: what clients reach it by, and its certificate names (decision
// D15).
//
// It refuses what no client could reach a server by, such as wildcards, URLs and unspecified addresses.
package names

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
)

// Parse splits names into DNS names and IPs. The default is the host of listen, and localhost.
func Parse(names []string, listen string) (dns []string, ips []netip.Addr, err error) {
	if len(names) == 0 {
		host, _, err := net.SplitHostPort(listen)
		if err != nil {
			return nil, nil, fmt.Errorf("listen: %w", err)
		}
		names = []string{"localhost"}
		if ip, err := netip.ParseAddr(host); host != "" && (err != nil || !ip.IsUnspecified()) {
			names = append(names, host)
		}
	}
	seen := map[string]bool{}
	for i, n := range names {
		if seen[n] {
			continue
		}
		seen[n] = true
		ip, err := netip.ParseAddr(n)
		switch {
		case err == nil && !ip.IsUnspecified() && ip.Zone() == "":
			ips = append(ips, ip.Unmap())
		case err != nil && isHostName(n):
			dns = append(dns, n)
		default:
			return nil, nil, fmt.Errorf("serverNames[%d]: %q is no name that clients can reach a server by; give DNS names such as chancery.example, or IPs", i, n)
		}
	}
	return dns, ips, nil
}

func isHostName(s string) bool {
	if len(s) > 253 {
		return false
	}
	for label := range strings.SplitSeq(s, ".") {
		if label == "" || len(label) > 63 || strings.Trim(label, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_") != "" {
			return false
		}
	}
	return true
}
