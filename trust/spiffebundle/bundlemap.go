package spiffebundle

import (
	"cmp"
	"encoding/json/jsontext"
	"encoding/json/v2"
	"errors"
	"fmt"
	"slices"

	"github.com/chancery-project/chancery/trust"
)

// Bounds of a bundle map.
const (
	MaxMapBytes   = 8 << 20
	MaxMapDomains = 1000
)

// ParseMap reads a bundle map: all of its bundles, in the order of their trust domains, or none. What a single one hints about refreshing
// does not count (section 5.1.1).
func ParseMap(data []byte) ([]*Bundle, error) {
	bundles, err := parseMap(data)
	if err != nil {
		return nil, fmt.Errorf("SPIFFE bundle map: %.600s", err)
	}
	return bundles, nil
}

func parseMap(data []byte) ([]*Bundle, error) {
	if len(data) > MaxMapBytes {
		return nil, fmt.Errorf("it has %d bytes; at most %d are read", len(data), MaxMapBytes)
	}
	var doc struct {
		Domains jsontext.Value `json:"trust_domains"`
	}
	if err := object(data, &doc); err != nil { // refuses trust domains that occur twice
		return nil, err
	}
	if doc.Domains.Kind() != '{' {
		return nil, errors.New("it has no trust_domains; they should be an object of bundles, by the names of their trust domains")
	}
	var byName map[string]jsontext.Value
	if err := json.Unmarshal(doc.Domains, &byName); err != nil {
		return nil, err
	}
	if len(byName) > MaxMapDomains {
		return nil, fmt.Errorf("it has %d trust domains; at most %d are read", len(byName), MaxMapDomains)
	}
	bundles := make([]*Bundle, 0, len(byName))
	for name, data := range byName {
		td, err := trust.ParseDomain(name)
		if err != nil {
			return nil, fmt.Errorf("trust_domains: %w", err)
		}
		b, err := Parse(td, data)
		if err != nil {
			return nil, err
		}
		b.RefreshHint = 0
		bundles = append(bundles, b)
	}
	slices.SortFunc(bundles, func(x, y *Bundle) int { return cmp.Compare(x.Domain.String(), y.Domain.String()) })
	return bundles, nil
}

// MarshalMap returns a bundle map of bundles of different trust domains, without their refresh hints.
func MarshalMap(bundles ...*Bundle) ([]byte, error) {
	byName := map[string]jsontext.Value{}
	for _, b := range bundles {
		name := b.Domain.String()
		if _, twice := byName[name]; twice {
			return nil, fmt.Errorf("SPIFFE bundle map: trust domain %s occurs twice", name)
		}
		own := *b
		own.RefreshHint = 0
		data, err := own.Marshal()
		if err != nil {
			return nil, err
		}
		byName[name] = data
	}
	doc := struct {
		Domains map[string]jsontext.Value `json:"trust_domains"`
	}{byName}
	return json.Marshal(doc, json.Deterministic(true))
}
