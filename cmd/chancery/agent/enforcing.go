package agent

import (
	"fmt"
	"strings"

	"github.com/chancery-project/chancery/sds"
)

// NotEnforcing tells which of the clients that are connected now take no notice of CRLs, and why (decision D23).
func NotEnforcing(streams []sds.StreamStatus) []string {
	type process struct {
		pid  int32
		node string
	}
	type state struct{ served, judges bool }
	all, workloads := 0, 0
	proxies := map[process]state{} // of all its streams: Envoy opens one for each secret
	for _, st := range streams {
		if st.API == sds.APIX509SVID || st.API == sds.APIX509Bundles {
			workloads++
			continue
		}
		by := process{st.Peer.PID, st.Node}
		p := proxies[by]
		for _, r := range st.Resources {
			switch {
			case r.Unknown:
			case r.Name == sds.NameAll:
				all++
				p.judges = true // it is counted already
			case carriesCRLs(r.Name):
				p.judges = true
			case r.Name == sds.NameDefault || strings.HasPrefix(r.Name, "spiffe://"):
				p.served = true
			}
		}
		proxies[by] = p
	}
	elsewhere := 0
	for _, p := range proxies {
		if p.served && !p.judges {
			elsewhere++
		}
	}
	var out []string
	for _, is := range []struct {
		n    int
		text string
	}{
		{all, "subscriptions of ALL: Envoy's SPIFFE validator ignores CRLs"},
		{elsewhere, "proxies with an SVID from here and roots from elsewhere: nothing brings them CRLs"},
		{workloads, "streams of the Workload API: whether the program looks at the CRLs in it is not known; go-spiffe does not"},
	} {
		if is.n > 0 {
			out = append(out, fmt.Sprintf("%d %s", is.n, is.text))
		}
	}
	return out
}

// carriesCRLs reports whether SDS resources of this name are validation contexts that have CRLs.
func carriesCRLs(name string) bool {
	domain, isID := strings.CutPrefix(name, "spiffe://")
	return name == sds.NameRoots || strings.HasPrefix(name, sds.PrefixService) || isID && !strings.Contains(domain, "/")
}
