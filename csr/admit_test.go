package csr

import "testing"

// Nodes of two clusters may have one name; what is noisy in one must not count against the other.
func TestD19NodesOfTwoClustersAreNotOne(t *testing.T) {
	one := caller{Caller: Caller{Cluster: "one", Node: "worker"}}
	two := caller{Caller: Caller{Cluster: "two", Node: "worker"}}
	if one.place() == two.place() {
		t.Errorf("both are %q", one.place())
	}
	if unknown := (caller{Caller: Caller{Cluster: "one"}}); unknown.place() != "" {
		t.Errorf("a caller without a node is on %q", unknown.place())
	}
}
