//go:build !awskms

package kms

import "context"

func openAWS(context.Context, *URI) (service, error) { return nil, notBuilt("awskms") }
