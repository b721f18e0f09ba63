package csr

import (
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"
)

// errorDomain marks our reasons among those of other services.
const errorDomain = "chancery"

// details returns the machine-readable side of a refusal.
func (d *Denial) details() []protoadapt.MessageV1 {
	out := []protoadapt.MessageV1{&errdetails.ErrorInfo{Reason: d.Reason, Domain: errorDomain}}
	if d.RetryAfter > 0 {
		out = append(out, &errdetails.RetryInfo{RetryDelay: durationpb.New(d.RetryAfter)})
	}
	return out
}
