// Package kube owns what an API server is asked for: keys, TokenReviews and pods, so that it vouches for service-account
// tokens and the pods that they are bound to. A [Cluster] is one cluster's [csr.Cluster]: it verifies tokens against
// that cluster's keys and no other's, and follows its pods, so that the usual request costs the API server nothing.
//
//	client, err := kube.NewClient("kubeconfig.yaml")
//	cluster, err := kube.New(kube.Config{
//		Name:      "Kubernetes",
//		Issuer:    "https://kubernetes.default.svc",
//		Audiences: []string{"istio-ca"},
//		Client:    client,
//	})
//	go cluster.Run(ctx)
//	caller, err := cluster.Authenticate(ctx, token)
//
// What a token must be like is said in csr/jwt, which verifies it without an API server; this package gives it the
// cluster's keys and asks for a TokenReview where the configuration wants that. The pod's life is checked here on every
// call (decision D18).
//
// A pod lives while it has the token's UID, node and service account, is Pending or Running, and was not to be gone
// more than 60 s ago, the leeway that the API server gives too. The watch counts as synced until it has been broken
// for 60 s or silent for 3 min (the API server sends a bookmark every minute); then, and for a pod not seen yet, one
// bounded request asks for the pod, and if it fails the caller is told to try again.
//
// The package refuses tokens of pods that are gone, elsewhere or unknown, and an API server whose certificate is not
// verified. It grants nothing: it says who calls, and csr decides what for. It is the only package under csr that
// imports client-go.
//
// The client needs these rights: get, list and watch pods; create tokenreviews unless TokenReview is [Never]; get
// /openid/v1/jwks (ClusterRole system:service-account-issuer-discovery) unless a file gives the keys.
//
// Whoever can write the JWKS file, or answer as the API server, can be anybody in this cluster, and nobody in another
// one (invariant 12).
package kube
