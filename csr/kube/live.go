package kube

import (
	"context"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/chancery-project/chancery/csr"
	"github.com/chancery-project/chancery/csr/jwt"
)

// maxListed bounds the pods of one namespace on one node that we ask for; the kubelet's default is 110 in all.
const maxListed = 1000

// podList is an answer to a list; all is false if there was more.
type podList struct {
	pods []*pod
	all  bool
}

// checkPod checks that the pod of a token lives, and fills in its node.
func (c *Cluster) checkPod(ctx context.Context, caller *csr.Caller, now time.Time) error {
	if caller.PodUID == "" {
		if c.unbound {
			return nil
		}
		return deny(codes.Unauthenticated, csr.ReasonTokenNoPod, "the token is bound to no pod")
	}
	if c.pods == nil {
		return nil
	}
	name := podName{caller.Namespace, caller.PodName}
	p, gone := c.pods.named(name, caller.PodUID, now)
	if gone {
		return podGone("pod %s/%s with the token's UID is gone", name.namespace, name.name)
	}
	if p == nil || p.node == "" { // not seen, or seen before it had a node
		var err error
		if p, err = c.getPod(ctx, name); err != nil {
			return err
		}
	}
	if p.uid != caller.PodUID {
		return podGone("pod %s/%s has another UID than the token's", name.namespace, name.name)
	}
	if err := p.check(caller.ServiceAccount, caller.Node, now); err != nil {
		return err
	}
	caller.Node = p.node
	return nil
}

// check checks a pod that is known to be the right one. An empty node is any node.
func (p *pod) check(account, node string, now time.Time) error {
	switch {
	case p.account != account:
		return deny(codes.Unauthenticated, csr.ReasonPodMismatch, "pod %s/%s runs as service account %q, not %q", p.namespace, p.name, p.account, account)
	case node != "" && p.node != node:
		return deny(codes.Unauthenticated, csr.ReasonPodMismatch, "pod %s/%s is on node %q, not %q", p.namespace, p.name, p.node, node)
	case !p.alive(now):
		return podGone("pod %s/%s has ended or was deleted", p.namespace, p.name)
	}
	return nil
}

func podGone(format string, args ...any) error {
	return deny(codes.Unauthenticated, csr.ReasonPodGone, format, args...)
}

// getPod asks the API server for a pod. Callers that ask for the same one share the answer.
func (c *Cluster) getPod(ctx context.Context, n podName) (*pod, error) {
	p, err := c.gets.shared(ctx, n.namespace+"/"+n.name, func(ctx context.Context) (*pod, error) {
		o, err := c.client.getPod(ctx, n.namespace, n.name)
		if err != nil {
			return nil, err
		}
		return c.pods.podOf(o), nil
	})
	switch {
	case apierrors.IsNotFound(err):
		return nil, podGone("there is no pod %s/%s", n.namespace, n.name)
	case err != nil:
		return nil, deny(codes.Unavailable, csr.ReasonPodUnknown, "the watch does not vouch for pod %s/%s, and asking for it failed: %v", n.namespace, n.name, err)
	}
	return p, nil
}

// listPods asks the API server for a namespace's pods on a node.
func (c *Cluster) listPods(ctx context.Context, namespace, node string) (podList, error) {
	l, err := c.lists.shared(ctx, namespace+"/"+node, func(ctx context.Context) (podList, error) {
		o := metav1.ListOptions{FieldSelector: livingPods, Limit: maxListed}
		if node != "" {
			o.FieldSelector += ",spec.nodeName=" + node
		}
		l, err := c.client.listPods(ctx, namespace, o)
		if err != nil {
			return podList{}, err
		}
		return c.podsOf(l), nil
	})
	if err != nil {
		return podList{}, deny(codes.Unavailable, csr.ReasonPodUnknown, "the watch does not vouch for such a pod, and asking for those of namespace %s on node %q failed: %v", namespace, node, err)
	}
	return l, nil
}

func (c *Cluster) podsOf(l *corev1.PodList) podList {
	out := podList{all: l.Continue == ""}
	for i := range l.Items {
		out.pods = append(out.pods, c.pods.podOf(&l.Items[i]))
	}
	return out
}

// Alive checks that the pod that an SVID was issued for still lives; an empty node is any node. Where pods are not
// watched it returns nil.
func (c *Cluster) Alive(ctx context.Context, namespace, account, node string, hash []byte) error {
	if c.pods == nil {
		return nil
	}
	var h podHash
	if copy(h[:], hash) != len(hash) || len(hash) != len(h) {
		return podGone("the SVID's pod hash is %d bytes long; it should be %d", len(hash), len(h))
	}
	now := time.Now()
	p, gone := c.pods.hashed(h, now)
	if gone {
		return podGone("the SVID's pod in namespace %s is gone", namespace)
	}
	if p == nil {
		l, err := c.listPods(ctx, namespace, node)
		if err != nil {
			return err
		}
		i := slices.IndexFunc(l.pods, func(p *pod) bool { return p.hash == h })
		switch {
		case i < 0 && !l.all:
			return deny(codes.Unavailable, csr.ReasonPodUnknown, "namespace %s has too many pods to look for the SVID's", namespace)
		case i < 0:
			return podGone("no pod of namespace %s on node %q is the SVID's", namespace, node)
		}
		p = l.pods[i]
	}
	if p.namespace != namespace {
		return deny(codes.Unauthenticated, csr.ReasonPodMismatch, "the SVID's pod is in namespace %s, not %s", p.namespace, namespace)
	}
	return p.check(account, node, now)
}

// OnNode checks that the caller is a node agent whose node runs a live pod of the namespace and account. The caller
// must come from Authenticate with a pod-bound token, never from a certificate alone (decision D16).
func (c *Cluster) OnNode(ctx context.Context, caller csr.Caller, namespace, account string) error {
	refuse := func(reason, format string, args ...any) error {
		return deny(codes.PermissionDenied, reason, format, args...)
	}
	agent := caller.Namespace + "/" + caller.ServiceAccount
	switch {
	case c.pods == nil:
		return refuse(csr.ReasonNoPodWatch, "service account %s asks for %s/%s, not for itself; only node agents may, and not in cluster %s: its pods are not watched, so nobody can tell what runs on a node", agent, namespace, account, c.name)
	case caller.Method != csr.MethodToken || caller.PodUID == "":
		return refuse(csr.ReasonTokenNoPod, "asking for another pod needs a token that is bound to a pod")
	case caller.Cluster != "" && caller.Cluster != c.name:
		return refuse(csr.ReasonCluster, "the caller is of cluster %s, not %s", caller.Cluster, c.name)
	case !c.agents[agent]:
		return refuse(csr.ReasonNotNodeAgent, "service account %s is no node agent", agent)
	case caller.Node == "":
		return refuse(csr.ReasonNotOnNode, "the caller's node is not known")
	}
	if err := jwt.CheckAccount(namespace, account); err != nil {
		return refuse(csr.ReasonNotOnNode, "%v", err)
	}
	now := time.Now()
	if err := c.checkPod(ctx, &caller, now); err != nil {
		return err
	}
	at := place{caller.Node, namespace, account}
	if c.pods.runs(at, now) {
		return nil
	}
	l, err := c.listPods(ctx, namespace, caller.Node)
	if err != nil {
		return err
	}
	if slices.ContainsFunc(l.pods, func(p *pod) bool { return p.place() == at && p.alive(now) }) {
		return nil
	}
	if !l.all {
		return deny(codes.Unavailable, csr.ReasonPodUnknown, "node %s has too many pods of namespace %s", caller.Node, namespace)
	}
	return refuse(csr.ReasonNotOnNode, "node %s runs no live pod of %s/%s", caller.Node, namespace, account)
}
