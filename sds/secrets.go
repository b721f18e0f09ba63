package sds

import (
	"context"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	secretv3 "github.com/envoyproxy/go-control-plane/envoy/service/secret/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/anypb"

	rpcstatus "google.golang.org/genproto/googleapis/rpc/status"

	"github.com/chancery-project/chancery/sds/secret"
	"github.com/chancery-project/chancery/sds/view"
)

// typeURL is the one type of resource that is served.
const typeURL = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret"

// secretService is Envoy's secret discovery service.
type secretService struct {
	secretv3.UnimplementedSecretDiscoveryServiceServer
	*Server
}

// StreamSecrets serves the state of the world: each response holds all resources of the stream that exist, and an
// unknown name is answered by its absence. The protocol has no way to take a single secret back.
func (s *secretService) StreamSecrets(stream secretv3.SecretDiscoveryService_StreamSecretsServer) error {
	sub, _, err := s.open(stream.Context(), APIStateOfTheWorld)
	if err != nil {
		return err
	}
	defer s.close(sub)
	asked := false // a request has changed the set of names, so it is answered even if it holds nothing new
	handle := func(r *discoveryv3.DiscoveryRequest) error {
		if err := checkType(r.GetTypeUrl()); err != nil {
			return err
		}
		if first := sub.greet(r.GetNode()); !first && r.GetResponseNonce() != "" {
			if !s.settle(sub, r.GetResponseNonce(), r.GetErrorDetail()) {
				return nil // answers a response that a later one has overtaken
			}
		}
		changed, err := sub.replace(s.Server, r.GetResourceNames())
		asked = asked || changed
		return err
	}
	return follow(stream, sub.pump, handle, func(v *View) error {
		s.prepare(sub, v)
		d := s.compare(sub, v)
		s.reportAbsent(sub, d.absent)
		// What is only pending is waited for; see View.Identities.
		if d.empty() && !(asked && d.settled) {
			return nil
		}
		asked = false
		s.cfg.Metrics.pushes.WithLabelValues(sub.api).Inc()
		return stream.Send(&discoveryv3.DiscoveryResponse{
			VersionInfo: secret.VersionOf(d.full),
			Resources:   secretsOf(d.full),
			TypeUrl:     typeURL,
			Nonce:       sub.launch(d.full, v),
		})
	})
}

// DeltaSecrets serves changes: a response holds what is new to the stream and the names that hold nothing any more,
// or never did.
func (s *secretService) DeltaSecrets(stream secretv3.SecretDiscoveryService_DeltaSecretsServer) error {
	sub, _, err := s.open(stream.Context(), APIDelta)
	if err != nil {
		return err
	}
	defer s.close(sub)
	handle := func(r *discoveryv3.DeltaDiscoveryRequest) error {
		if err := checkType(r.GetTypeUrl()); err != nil {
			return err
		}
		sub.greet(r.GetNode())
		if r.GetResponseNonce() != "" {
			s.settle(sub, r.GetResponseNonce(), r.GetErrorDetail())
		}
		return sub.update(s.Server, r.GetResourceNamesSubscribe(), r.GetResourceNamesUnsubscribe(), r.GetInitialResourceVersions())
	}
	return follow(stream, sub.pump, handle, func(v *View) error {
		s.prepare(sub, v)
		for {
			d := s.compare(sub, v)
			s.reportAbsent(sub, d.absent)
			if d.empty() {
				return nil
			}
			resp := &discoveryv3.DeltaDiscoveryResponse{
				SystemVersionInfo: secret.VersionOf(d.full),
				TypeUrl:           typeURL,
				RemovedResources:  append(d.removed, d.absent...),
				Nonce:             sub.launch(d.changed, v),
			}
			for _, r := range d.changed {
				resp.Resources = append(resp.Resources, &discoveryv3.Resource{Name: r.Name, Version: r.Version, Resource: r.Packed})
			}
			s.cfg.Metrics.pushes.WithLabelValues(sub.api).Inc()
			if err := stream.Send(resp); err != nil {
				return err
			}
		}
	})
}

// FetchSecrets answers once with what exists now.
func (s *secretService) FetchSecrets(ctx context.Context, r *discoveryv3.DiscoveryRequest) (*discoveryv3.DiscoveryResponse, error) {
	if err := checkType(r.GetTypeUrl()); err != nil {
		return nil, err
	}
	p, source, err := s.attest(ctx)
	if err != nil {
		return nil, err
	}
	sub := &subscription{api: APIStateOfTheWorld, peer: p, names: make(map[string]*entry)}
	sub.consumer = s.join(p, APIStateOfTheWorld)
	defer s.leave(sub)
	defer sub.forget(s.Server)
	if _, err := sub.replace(s.Server, r.GetResourceNames()); err != nil {
		return nil, err
	}
	seen, _ := source()
	s.prepare(sub, seen)
	d := s.compare(sub, seen)
	s.reportAbsent(sub, d.absent)
	if len(d.full) == 0 && len(d.absent) == 0 {
		return nil, status.Error(codes.Unavailable, "nothing has been issued to this caller yet; try again")
	}
	return &discoveryv3.DiscoveryResponse{VersionInfo: secret.VersionOf(d.full), Resources: secretsOf(d.full), TypeUrl: typeURL}, nil
}

func checkType(got string) error {
	if got == "" || got == typeURL { // a service of one type may leave it out
		return nil
	}
	return status.Errorf(codes.InvalidArgument, "type_url is %.200q; this service has only %q", got, typeURL)
}

func secretsOf(rs []*secret.Resource) []*anypb.Any {
	out := make([]*anypb.Any, len(rs))
	for i, r := range rs {
		out[i] = r.Packed
	}
	return out
}

// greet notes the node's id, which comes with the first request, and reports whether this is it.
func (sub *subscription) greet(n *corev3.Node) (first bool) {
	sub.mu.Lock()
	defer sub.mu.Unlock()
	if sub.node == "" {
		sub.node = clip(n.GetId(), maxNodeID)
	}
	return !sub.started
}

// settle records an ACK or NACK; false means that it is stale. A NACK is not answered by sending the same again: the
// proxy keeps what it has until there is something new.
func (s *Server) settle(sub *subscription, nonce string, e *rpcstatus.Status) bool {
	var message *string
	if e != nil {
		message = new(clip(e.GetMessage(), maxNACKBytes))
	}
	items, ok := sub.settle(nonce, message)
	switch {
	case items == nil:
	case e == nil:
		s.cfg.Metrics.acks.WithLabelValues(sub.api).Inc()
	default:
		names := make([]string, len(items))
		for i, it := range items {
			names[i] = it.name
			s.cfg.Metrics.nacks.WithLabelValues(string(view.KindOf(it.name))).Inc()
		}
		s.cfg.Logger.Warn("proxy rejected secrets", "node", sub.nodeID(), "uid", sub.peer.UID, "resources", names, "reason", *message)
	}
	return ok
}

func (s *Server) reportAbsent(sub *subscription, names []string) {
	for _, n := range names {
		s.cfg.Metrics.unknown.WithLabelValues(string(view.KindOf(n))).Inc()
		s.cfg.Logger.Info("unknown resource asked for", "node", sub.nodeID(), "uid", sub.peer.UID, "resource", clip(n, 256))
	}
}
