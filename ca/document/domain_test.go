package document

import (
	"strings"
	"testing"

	"github.com/chancery-project/chancery/trust"
)

// TestOtherTrustDomainIsNamed: a config with another trust domain than the state's is told what the state has.
func TestOtherTrustDomainIsNamed(t *testing.T) {
	other, err := trust.ParseDomain("other.local")
	if err != nil {
		t.Fatal(err)
	}
	d := New()
	d.Domains = map[string]*DomainState{td.String(): {}}
	for _, kind := range []AuthorityKind{KindRoot, KindIssuer} {
		if _, err := d.Active(other, kind); err == nil || !strings.Contains(err.Error(), "nothing for trust domain other.local; it has [cluster.local]") {
			t.Errorf("%s: %v", kind, err)
		}
	}
}
