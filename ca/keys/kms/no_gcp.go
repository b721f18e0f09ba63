//go:build !gcpkms

package kms

import "context"

func openGCP(context.Context, *URI) (service, error) { return nil, notBuilt("gcpkms") }
