// Package kube owns what secure naming reads of a Kubernetes cluster: Services, EndpointSlices, pods, and, where a cluster has them, Istio's
// ServiceEntries and WorkloadEntries. It lists and watches them, keeps of each the few words that trust/naming wants, and tells what is wrong.
//
// It refuses to take an answer that did not come for an empty one: a cluster that cannot be reached keeps what was last known of it, and one
// that was never read has nothing to say.
package kube
