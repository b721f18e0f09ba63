package federating

import (
	"strings"
	"testing"
	"time"

	"github.com/chancery-project/chancery/trust"
)

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// TestParse has for each field what is wrong with it; every error names the field and what would be right.
func TestParse(t *testing.T) {
	own := must(trust.ParseDomain("cluster.local"))
	good := RelationshipConfig{TrustDomain: "b.example", URL: "https://b.example/", Profile: "https_web"}
	spiffe := RelationshipConfig{TrustDomain: "b.example", URL: "https://b.example/", Profile: "https_spiffe", EndpointID: "spiffe://b.example/server"}
	with := func(c RelationshipConfig, change func(*RelationshipConfig)) []RelationshipConfig {
		change(&c)
		return []RelationshipConfig{c}
	}
	web := EndpointConfig{Listen: ":0", Profile: "https_web", Certificate: "c", Key: "k"}
	end := func(change func(*EndpointConfig)) *EndpointConfig { c := web; change(&c); return &c }
	many := []RelationshipConfig{}
	for range 101 {
		many = append(many, good)
	}
	for _, c := range []struct {
		all  []RelationshipConfig
		e    *EndpointConfig
		want string
	}{
		{nil, nil, ""},
		{[]RelationshipConfig{good, with(spiffe, func(c *RelationshipConfig) { c.TrustDomain = "c.example" })[0]}, &web, ""},
		{with(spiffe, func(c *RelationshipConfig) { c.Bootstrap = "f" }), nil, ""},
		{with(good, func(c *RelationshipConfig) { c.Roots = "f" }), nil, ""},
		{many, nil, "federation has 101 entries; at most 100"},
		{[]RelationshipConfig{good, good}, nil, "federation[1].trustDomain: b.example is that of federation[0] already"},
		{with(good, func(c *RelationshipConfig) { c.TrustDomain = "" }), nil, "federation[0].trustDomain is missing"},
		{with(good, func(c *RelationshipConfig) { c.TrustDomain = "B.example" }), nil, "federation[0].trustDomain: "},
		{with(good, func(c *RelationshipConfig) { c.TrustDomain = "cluster.local" }), nil, "federation[0].trustDomain: cluster.local is our own"},
		{with(good, func(c *RelationshipConfig) { c.URL = "http://b" }), nil, "federation[0].url: "},
		{with(good, func(c *RelationshipConfig) { c.Profile = "" }), nil, "federation[0].profile is missing"},
		{with(good, func(c *RelationshipConfig) { c.EndpointID = "spiffe://b.example/x" }), nil, "federation[0].endpointID: with https_web"},
		{with(spiffe, func(c *RelationshipConfig) { c.EndpointID = "" }), nil, "federation[0].endpointID is missing"},
		{with(spiffe, func(c *RelationshipConfig) { c.EndpointID = "spiffe://b.example" }), nil, "federation[0].endpointID: "},
		{with(spiffe, func(c *RelationshipConfig) { c.Roots = "f" }), nil, "federation[0].roots: with https_spiffe"},
		{with(spiffe, func(c *RelationshipConfig) { c.Bootstrap, c.EndpointID = "f", "spiffe://c.example/x" }), nil, "federation[0].bootstrap: only"},
		{with(good, func(c *RelationshipConfig) { c.Bootstrap = "f" }), nil, "federation[0].bootstrap: only"},
		{nil, end(func(c *EndpointConfig) { c.Listen = "" }), "bundleEndpoint.listen is missing"},
		{nil, end(func(c *EndpointConfig) { c.Listen = "x" }), "bundleEndpoint.listen: "},
		{nil, end(func(c *EndpointConfig) { c.Profile = "" }), "bundleEndpoint.profile is missing"},
		{nil, end(func(c *EndpointConfig) { c.Profile = "acme" }), `bundleEndpoint.profile: "acme" is not known`},
		{nil, end(func(c *EndpointConfig) { c.Key = "" }), "both certificate and key"},
		{nil, end(func(c *EndpointConfig) { c.Profile = "https_spiffe" }), "leave certificate and key out"},
		{nil, end(func(c *EndpointConfig) { c.RefreshHint = "59s" }), "bundleEndpoint.refreshHint: 59s should be between 1m0s and 24h0m0s"},
		{nil, end(func(c *EndpointConfig) { c.RefreshHint = "25h" }), "bundleEndpoint.refreshHint: 25h0m0s"},
		{nil, end(func(c *EndpointConfig) { c.RefreshHint = "61500ms" }), "in whole seconds"},
		{nil, end(func(c *EndpointConfig) { c.RefreshHint = "0s" }), "bundleEndpoint.refreshHint: 0s"},
		{nil, end(func(c *EndpointConfig) { c.RefreshHint = "5" }), "bundleEndpoint.refreshHint: "},
	} {
		_, err := Parse(c.all, c.e, own, nil)
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v %+v: %v, want %q", c.all, c.e, err, c.want)
		}
	}
}

// TestD24AliasIsNotFederated: a domain is one or the other.
func TestD24AliasIsNotFederated(t *testing.T) {
	own, alias := must(trust.ParseDomain("cluster.local")), must(trust.ParseDomain("b.example"))
	_, err := Parse([]RelationshipConfig{{TrustDomain: "b.example", URL: "https://b.example/", Profile: "https_web"}}, nil, own, []trust.Domain{alias})
	if err == nil || !strings.Contains(err.Error(), "federation[0].trustDomain: b.example is trustDomainAliases[0], too") || !strings.Contains(err.Error(), "D24") {
		t.Error(err)
	}
}

// TestD3ReadersOfTheEndpoint: those who federate cannot say that they have a root, so they get five refresh hints.
func TestD3ReadersOfTheEndpoint(t *testing.T) {
	own := must(trust.ParseDomain("cluster.local"))
	for hint, want := range map[string]time.Duration{"": 25 * time.Minute, "1m": 5 * time.Minute, "24h": 120 * time.Hour} {
		p := must(Parse(nil, &EndpointConfig{Listen: ":0", Profile: "https_spiffe", RefreshHint: hint}, own, nil))
		if p.Readers() != want {
			t.Errorf("%q: %s, want %s", hint, p.Readers(), want)
		}
	}
	if p := must(Parse(nil, nil, own, nil)); p.Readers() != 0 {
		t.Errorf("without an endpoint: %s", p.Readers())
	}
}
