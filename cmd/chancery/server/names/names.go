// Package names owns the `serverNames` of a server's config: what clients reach it by, and its certificate names (decision
// D15); and `trustDomainAliases`: whose identities count as its own.
//
// It refuses what no client could reach a server by, such as wildcards, URLs and unspecified addresses.
package names

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/chancery-project/chancery/trust"
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

// maxAliases bounds the trust domains whose identities count as ours.
const maxAliases = 32

// ParseAliases reads `trustDomainAliases`.
func ParseAliases(all []string, own trust.Domain) ([]trust.Domain, error) {
	if len(all) > maxAliases {
		return nil, fmt.Errorf("trustDomainAliases lists %d trust domains; at most %d are read", len(all), maxAliases)
	}
	var aliases []trust.Domain
	for i, name := range all {
		d, err := trust.ParseDomain(name)
		switch {
		case err != nil:
			return nil, fmt.Errorf("trustDomainAliases[%d]: %w", i, err)
		case d == own:
			return nil, fmt.Errorf("trustDomainAliases[%d]: %s is trustDomain itself; list others, or leave it out", i, d)
		case slices.Contains(aliases, d):
			return nil, fmt.Errorf("trustDomainAliases[%d]: %s is listed twice", i, d)
		}
		aliases = append(aliases, d)
	}
	return aliases, nil
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
