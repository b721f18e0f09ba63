package csr

import (
	"context"
	"errors"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/chancery-project/chancery/csr/admission"
	"github.com/chancery-project/chancery/trust"
)

// admit waits until a request of the caller may be worked on. Without a denial, s.admission.Release must follow.
func (s *Service) admit(ctx context.Context, c caller) *Denial {
	err := s.admission.Acquire(ctx, admission.Request{Node: c.place(), Identity: s.same(c.ID).String(), Ends: c.svidEnds})
	if err == nil {
		return nil
	}
	if b, ok := errors.AsType[*admission.Busy](err); ok {
		return busy(b.RetryAfter, b.Detail)
	}
	d := &Denial{Code: codes.Canceled, Reason: ReasonBusy, Detail: "the caller gave up waiting"}
	if errors.Is(err, context.DeadlineExceeded) {
		d.Code = codes.DeadlineExceeded
	}
	return d
}

// same returns an identity in the trust domain that the line is now: in each of its domains it is the same.
func (s *Service) same(id trust.ID) trust.ID {
	if td := s.present(); id.Domain() != td && !id.IsZero() {
		return id.WithDomain(td)
	}
	return id
}

func busy(retry time.Duration, detail string) *Denial {
	return &Denial{Code: codes.ResourceExhausted, Reason: ReasonBusy, Detail: detail, RetryAfter: retry}
}
