package csr

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/chancery-project/chancery/api/chanceryv1"
	"github.com/chancery-project/chancery/ca"
	"github.com/chancery-project/chancery/csr/agents"
	"github.com/chancery-project/chancery/csr/answers"
	"github.com/chancery-project/chancery/csr/evidence"
	"github.com/chancery-project/chancery/csr/lines"
)

const (
	apiNative = agents.Native
	maxBatch  = 100
)

// nativeService describes chancery.v1.Issuance.
func (s *Service) nativeService() *grpc.ServiceDesc {
	return &grpc.ServiceDesc{
		ServiceName: chanceryv1.Issuance_ServiceDesc.ServiceName, Metadata: chanceryv1.Issuance_ServiceDesc.Metadata,
		HandlerType: (*any)(nil), Streams: []grpc.StreamDesc{
			method("Issue", s.issueBatch),
			{StreamName: "Sync", ServerStreams: true, ClientStreams: true, Handler: func(_ any, g grpc.ServerStream) error { return s.sync(g) }},
			{StreamName: "GetBundle", ServerStreams: true, Handler: func(_ any, g grpc.ServerStream) error { return s.getBundle(g) }},
		},
	}
}

// retrySync is when an agent that there was no room for should come again.
const retrySync = 30 * time.Second

// sync serves one agent's stream, also one whose identity is revoked. Nothing of a stranger's is read.
func (s *Service) sync(g grpc.ServerStream) error {
	start := time.Now()
	c, d := s.authenticateApart(g.Context())
	if d == nil {
		place := c.place() + " " + c.PodUID
		if c.PodUID == "" {
			host, _, _ := net.SplitHostPort(c.remote)
			place += host
		}
		err := s.agents.Serve(agents.Caller{ID: c.ID.String(), Remote: c.remote, Place: place, Ends: c.Ends, MaxAge: s.maxAge}, g)
		if !errors.Is(err, agents.ErrBusy) {
			return err
		}
		d = busy(retrySync, err.Error())
	}
	return s.refuse(c, d, start)
}

// getBundle answers anybody, whether anything can be issued or not. Nothing that a stranger sends is read; package others bounds them.
func (s *Service) getBundle(g grpc.ServerStream) error {
	m, err := s.bundles.Newest()
	if err != nil {
		d := notReady(err)
		return d.status(d.message(caller{}))
	}
	return g.SendMsg(m)
}

// issueBatch signs a batch. It fails as a whole only for its caller or its size; each request has a result of its own.
func (s *Service) issueBatch(ctx context.Context, read func(proto.Message) error) (proto.Message, error) {
	start := time.Now()
	call, c, d := s.begin(ctx)
	defer call.Leave()
	if d != nil {
		return nil, s.refuse(c, d, start)
	}
	r := new(chanceryv1.IssueRequest)
	if err := read(r); err != nil {
		return nil, err
	}
	if n := len(r.GetRequests()); n < 1 || n > maxBatch {
		return nil, s.refuse(c, badCSR("the batch has %d requests; send 1 to %d", n, maxBatch), start)
	}
	if n := len(r.GetAgent()); n != 0 && n != evidence.AgentID {
		return nil, s.refuse(c, badCSR("the agent's ID has %d bytes; it should have %d, or none", n, evidence.AgentID), start)
	}
	shared := call.Chains()
	resp := &chanceryv1.IssueResponse{Bundle: shared.Bundle(), Checkpoints: s.checkpoints()}
	resp.SignedBundle, _ = s.bundles.Signed(shared.Issuer().Bundle()) // of the same snapshot; why there is none, the log says
	for _, one := range r.GetRequests() {
		begun := time.Now()
		result, d := s.result(ctx, call, c, r.GetAgent(), one)
		s.metrics.observe(apiNative, c.Method, outcome(d), time.Since(begun))
		if d != nil {
			s.denied(c, one.GetSpiffeId(), d)
		}
		resp.Results = append(resp.Results, result)
	}
	return resp, nil
}

func (s *Service) refuse(c caller, d *Denial, start time.Time) error {
	s.metrics.observe(apiNative, c.Method, outcome(d), time.Since(start))
	s.denied(c, "", d)
	return d.status(d.message(c))
}

func (s *Service) result(ctx context.Context, call *lines.Call, c caller, agent []byte, r *chanceryv1.CertificateRequest) (*chanceryv1.Result, *Denial) {
	if t := r.GetReplacesUntil(); t != nil { // a connection may show an older SVID, or none
		c.svidEnds = t.AsTime()
	}
	ttl, d := lifetimeOf(r)
	var shared *answers.Chains
	var cert *ca.Certificate
	var id fmt.Stringer
	if d == nil {
		shared, cert, id, d = s.issue(ctx, call, c, ask{r.GetCsr(), r.GetSpiffeId(), ttl, apiNative, agent})
	}
	if d != nil {
		refusal := &chanceryv1.Refusal{Code: uint32(d.Code), Reason: d.Reason, Message: d.message(c)}
		if d.RetryAfter > 0 {
			refusal.RetryAfter = durationpb.New(d.RetryAfter)
		}
		return &chanceryv1.Result{Outcome: &chanceryv1.Result_Refusal{Refusal: refusal}}, d
	}
	return &chanceryv1.Result{Outcome: &chanceryv1.Result_Certificate{Certificate: &chanceryv1.Certificate{
		SpiffeId: id.String(), Chain: shared.Native(cert.DER), NotAfter: timestamppb.New(cert.NotAfter),
	}}}, nil
}

// lifetimeOf reads the lifetime; one beyond what a Go duration holds is an error, not a wrap-around (decision D20).
func lifetimeOf(r *chanceryv1.CertificateRequest) (time.Duration, *Denial) {
	l := r.GetLifetime()
	if l == nil {
		return 0, nil
	}
	_, err := ca.Seconds(l.GetSeconds())
	if err == nil {
		err = l.CheckValid()
	}
	if err != nil {
		return 0, &Denial{Code: codes.InvalidArgument, Reason: ReasonLifetime, Detail: err.Error()}
	}
	return l.AsDuration(), nil
}

// message is what a caller is told: of our own faults only that there is one, and the detail only once it is known who
// asks. Details of faults name our files and the API server's address.
func (d *Denial) message(c caller) string {
	switch {
	case d.Code == codes.Internal:
		return "internal error; see the server's log"
	case d.Code == codes.Unavailable:
		return "not possible now: " + d.Reason + "; the server's log says why"
	case c.ID.IsZero():
		return "the caller could not be authenticated: " + d.Reason
	}
	return d.Detail
}
