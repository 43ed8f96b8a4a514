// Says whether the library of Standard Webhooks verifies the request that it reads, as JSON.
package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"

	standardwebhooks "github.com/standard-webhooks/standard-webhooks/libraries/go"
)

func main() {
	var request struct {
		Secret, Body string
		Headers      map[string]string
	}
	if err := json.NewDecoder(os.Stdin).Decode(&request); err != nil {
		panic(err)
	}
	hook, err := standardwebhooks.NewWebhook(request.Secret)
	if err != nil {
		panic(err)
	}
	headers := http.Header{}
	for name, value := range request.Headers {
		headers.Set(name, value)
	}
	if hook.Verify([]byte(request.Body), headers) != nil {
		fmt.Println("refused")
		return
	}
	fmt.Println("verified")
}
