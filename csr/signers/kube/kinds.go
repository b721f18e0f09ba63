package kube

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/chancery-project/chancery/csr/signers"
)

// pods are PodCertificateRequests.
type pods struct{ signer *signers.Signer }

func (pods) resource() string      { return "podcertificaterequests" }
func (pods) empty() runtime.Object { return &certificatesv1.PodCertificateRequest{} }
func (pods) list() runtime.Object  { return &certificatesv1.PodCertificateRequestList{} }

func (pods) read(o runtime.Object) *request {
	p, ok := o.(*certificatesv1.PodCertificateRequest)
	if !ok {
		return nil
	}
	r := &request{
		namespace: p.Namespace, name: p.Name, uid: string(p.UID), node: string(p.Spec.NodeName), identity: p.Namespace + "/" + p.Spec.ServiceAccountName,
	}
	if len(p.Status.Conditions) == 0 && p.DeletionTimestamp == nil {
		p.ManagedFields = nil // nearly half of it
		r.object = p
	}
	return r
}

func (k pods) decide(ctx context.Context, o runtime.Object) (*signers.Signed, *signers.Refusal) {
	p := o.(*certificatesv1.PodCertificateRequest)
	life := 24 * time.Hour // the API's default
	if s := p.Spec.MaxExpirationSeconds; s != nil {
		life = time.Duration(*s) * time.Second
	}
	return k.signer.Pod(ctx, signers.Pod{
		Namespace: p.Namespace, Name: p.Spec.PodName, UID: string(p.Spec.PodUID), ServiceAccount: p.Spec.ServiceAccountName, Node: string(p.Spec.NodeName),
		Request: p.Spec.StubPKCS10Request, MaxLife: life, Annotations: p.Spec.UnverifiedUserAnnotations, Object: p.Name,
	})
}

func (pods) settle(o runtime.Object, s *signers.Signed, r *signers.Refusal) runtime.Object {
	p := o.(*certificatesv1.PodCertificateRequest)
	out := &certificatesv1.PodCertificateRequest{TypeMeta: typeMeta("PodCertificateRequest"), ObjectMeta: sameObject(p.ObjectMeta), Spec: p.Spec}
	condition := metav1.Condition{Status: metav1.ConditionTrue, LastTransitionTime: metav1.Now()}
	if s == nil {
		condition.Type, condition.Reason, condition.Message = certificatesv1.PodCertificateRequestConditionTypeDenied, r.Reason, message(r.Detail)
		out.Status.Conditions = []metav1.Condition{condition}
		return out
	}
	condition.Type, condition.Reason, condition.Message = certificatesv1.PodCertificateRequestConditionTypeIssued, "Issued", "issued "+s.ID
	notBefore, refresh, notAfter := metav1.NewTime(s.NotBefore), metav1.NewTime(s.Refresh), metav1.NewTime(s.NotAfter)
	out.Status = certificatesv1.PodCertificateRequestStatus{
		Conditions: []metav1.Condition{condition}, CertificateChain: string(s.Chain), NotBefore: &notBefore, BeginRefreshAt: &refresh, NotAfter: &notAfter,
	}
	return out
}

// named are CertificateSigningRequests.
type named struct{ signer *signers.Signer }

func (named) resource() string      { return "certificatesigningrequests" }
func (named) empty() runtime.Object { return &certificatesv1.CertificateSigningRequest{} }
func (named) list() runtime.Object  { return &certificatesv1.CertificateSigningRequestList{} }

func (named) read(o runtime.Object) *request {
	c, ok := o.(*certificatesv1.CertificateSigningRequest)
	if !ok {
		return nil
	}
	r := &request{name: c.Name, uid: string(c.UID), node: c.Spec.Username, identity: c.Spec.Username}
	if has(c, certificatesv1.CertificateApproved) && !has(c, certificatesv1.CertificateDenied) && !has(c, certificatesv1.CertificateFailed) &&
		len(c.Status.Certificate) == 0 && c.DeletionTimestamp == nil {
		c.ManagedFields = nil
		r.object = c
	}
	return r
}

func has(c *certificatesv1.CertificateSigningRequest, t certificatesv1.RequestConditionType) bool {
	return slices.ContainsFunc(c.Status.Conditions, func(x certificatesv1.CertificateSigningRequestCondition) bool {
		return x.Type == t && cmp.Or(x.Status, corev1.ConditionTrue) == corev1.ConditionTrue
	})
}

func (k named) decide(ctx context.Context, o runtime.Object) (*signers.Signed, *signers.Refusal) {
	c := o.(*certificatesv1.CertificateSigningRequest)
	n := signers.Named{Object: c.Name + " " + string(c.UID), User: c.Spec.Username, Request: c.Spec.Request}
	for _, u := range c.Spec.Usages {
		n.Usages = append(n.Usages, string(u))
	}
	if s := c.Spec.ExpirationSeconds; s != nil {
		n.Lifetime = time.Duration(*s) * time.Second
	}
	return k.signer.Named(ctx, n)
}

func (named) settle(o runtime.Object, s *signers.Signed, r *signers.Refusal) runtime.Object {
	c := o.(*certificatesv1.CertificateSigningRequest)
	out := &certificatesv1.CertificateSigningRequest{
		TypeMeta: typeMeta("CertificateSigningRequest"), ObjectMeta: sameObject(c.ObjectMeta), Spec: c.Spec,
		Status: certificatesv1.CertificateSigningRequestStatus{Conditions: slices.Clone(c.Status.Conditions)},
	}
	if s != nil {
		out.Status.Certificate = s.Chain
		return out
	}
	now := metav1.Now()
	out.Status.Conditions = append(out.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{
		Type: certificatesv1.CertificateFailed, Status: corev1.ConditionTrue, Reason: r.Reason, Message: message(r.Detail), LastUpdateTime: now, LastTransitionTime: now,
	})
	return out
}

func typeMeta(kind string) metav1.TypeMeta {
	return metav1.TypeMeta{APIVersion: certificatesv1.SchemeGroupVersion.String(), Kind: kind}
}

// sameObject is what says which object, and which version of it, a write is about.
func sameObject(m metav1.ObjectMeta) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: m.Namespace, Name: m.Name, UID: m.UID, ResourceVersion: m.ResourceVersion}
}

// message bounds what goes into a condition.
func message(s string) string {
	const most = 1000
	if len(s) > most {
		return strings.ToValidUTF8(s[:most], "") + "..." // a letter may have been cut
	}
	return s
}
